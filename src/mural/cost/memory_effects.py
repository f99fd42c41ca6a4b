"""Effects: what each call of a graph does to memory, forward and backward, found by running it alone without memory.

A call is run on meta tensors with the very strides that it gets in the model, so it is known whether a `reshape`
copies, which inputs share memory with outputs, what autograd keeps, and what gradients share. Equal calls
are run once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.cost.memory_tally import ROUNDED, Tally
from mural.cost.replay import call, signature
from mural.graph import Graph, Node
from mural.graph.facts import fact_of
from mural.graph.nodes import Place

META = torch.device("meta")
Strides = tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """A tensor that a call made: its bytes, or which given tensor's memory it shares (`shares`), and its strides.

    `view` says that autograd knows it as a view of another: writing to it in place costs more in backward.
    """

    bytes: int
    strides: Strides
    shares: int | None = None
    view: bool = False


@dataclass(frozen=True)
class Forward:
    """A forward call: what it makes, the most bytes while it runs, and what is kept for backward.

    `keeps` are inputs and `holds` outputs whose memory backward needs, by place; `inside` are further bytes.
    """

    outputs: tuple[Made, ...]
    peak: int
    inside: int
    keeps: tuple[int, ...]
    holds: tuple[int, ...]


@dataclass(frozen=True)
class Backward:
    """A backward call: the gradient of each input (None: it has none), and the most bytes while it runs.

    `shares` of a gradient is the place of the output whose gradient's memory it shares; two gradients may be twins: the
    later shares the memory of the earlier, given as −1 − place.
    """

    gradients: tuple[Made | None, ...]
    peak: int


@dataclass(frozen=True)
class Effect:
    """What one call of a graph does to memory; `backward` is None where no gradient comes through it."""

    forward: Forward
    backward: Backward | None
    strides: tuple[Strides, ...]
    """The strides of its inputs."""
    incoming: tuple[Strides | None, ...] = ()
    """The strides of the gradients of its outputs."""


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
    """Attention as the kernels of CPUs and GPUs do it: without a matrix of scores."""
    if any(isinstance(other, Tensor) for other in (*others, *named.values())):
        return F.scaled_dot_product_attention(query, key, value, *others, **named)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


def fused_dropout(image: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout as a GPU does it: out of place, where it drops some values, its mask is one byte a value."""
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(image, p, training)[0]
    return F.dropout(image, p, training, inplace)


AS_ON: dict[str, dict[Any, Callable[..., Any]]] = {
    "cuda": {F.scaled_dot_product_attention: fused_attention, F.dropout: fused_dropout},
    "cpu": {F.scaled_dot_product_attention: fused_attention},
}
"""Calls that a device runs in one kernel, where meta tensors take several."""


class Dry:
    """Runs calls without memory, each kind once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._forward: dict[Any, Forward] = {}
        self._backward: dict[Any, Backward] = {}

    def forward(self, node: Node, wanted: Collection[Place], given: tuple[Made, ...]) -> Forward:
        """What a call does to memory when it is given tensors like these."""
        key = (signature(node, wanted), tuple((made.strides, made.view) for made in given))
        if key not in self._forward:
            self._forward[key] = self._run(node, wanted, given)[0]
        return self._forward[key]

    def backward(
        self, node: Node, wanted: Collection[Place], given: tuple[Made, ...], incoming: tuple[Strides | None, ...]
    ) -> Backward:
        """What its backward does, for gradients of these strides; None stands for a gradient that does not come."""
        key = (signature(node, wanted), tuple((made.strides, made.view) for made in given), incoming)
        if key not in self._backward:
            tally, inputs, outputs = self._run(node, wanted, given)[1:]
            self._backward[key] = self._back(tally, inputs, outputs, incoming)
        return self._backward[key]

    def _run(
        self, node: Node, wanted: Collection[Place], given: tuple[Made, ...]
    ) -> tuple[Forward, Tally, list[Tensor], tuple[Tensor, ...]]:
        try:
            return self._called(node, wanted, given)
        except RuntimeError:
            if not any(read in wanted for read in node.reads):
                raise
            return self._called(node, (), given)  # autograd does not follow it: the model makes it without gradients

    def _called(
        self, node: Node, wanted: Collection[Place], given: tuple[Made, ...]
    ) -> tuple[Forward, Tally, list[Tensor], tuple[Tensor, ...]]:
        leaves = [
            torch.empty_strided(shape, made.strides, dtype=dtype, device=META).requires_grad_(at in wanted)
            for shape, made, dtype, at in zip(node.input_shapes, given, node.input_dtypes, node.reads, strict=True)
        ]
        inputs = list(leaves)
        if writes_first(node):  # no leaf may be written to, and a view is written to in another way
            inputs[0] = leaves[0].clone()
            inputs[0] = inputs[0].view_as(inputs[0]) if given[0].view else inputs[0]
        tally = Tally(ROUNDED[self.device])
        tally.ignore([*leaves, *inputs])
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            return tensor

        instead = AS_ON[self.device].get(node.func)
        with torch.enable_grad(), tally, torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            outputs = call(node, inputs, instead=instead)
        of = {memory(tensor): place for place, tensor in reversed(list(enumerate(inputs)))}
        made: list[Made] = []
        seen: dict[int, int] = {}
        for place, tensor in enumerate(outputs):
            shares = of.get(memory(tensor))
            if shares is None and memory(tensor) in seen:
                shares = -1 - seen[memory(tensor)]
            size = 0 if shares is not None else ROUNDED[self.device](tensor.untyped_storage().nbytes())
            made.append(Made(size, tensor.stride(), shares, tensor._is_view()))
            seen.setdefault(memory(tensor), place)
        kept = {memory(tensor) for tensor in saved}
        own = {memory(tensor) for tensor in (*inputs, *outputs)}
        inside = {memory(t): ROUNDED[self.device](t.untyped_storage().nbytes()) for t in saved if memory(t) not in own}
        forward = Forward(
            outputs=tuple(made),
            peak=tally.peak,
            inside=sum(inside.values()),
            keeps=tuple(place for key, place in of.items() if key in kept),
            holds=tuple(place for place, tensor in enumerate(outputs) if memory(tensor) in kept),
        )
        saved.clear()
        return forward, tally, leaves, outputs

    def _back(
        self, tally: Tally, inputs: list[Tensor], outputs: tuple[Tensor, ...], incoming: tuple[Strides | None, ...]
    ) -> Backward:
        ends = [
            (i, t, s)
            for i, (t, s) in enumerate(zip(outputs, incoming, strict=True))
            if s is not None and t.requires_grad
        ]
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        if not ends or not leaves:
            return Backward((None,) * len(inputs), 0)
        given = [
            torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=META) for _, tensor, stride in ends
        ]
        tally.ignore(given)
        of = {memory(tensor): place for (place, _, _), tensor in zip(ends, given, strict=True)}
        tally.forget()
        before = tally.live
        with tally:
            found = torch.autograd.grad([t for _, t, _ in ends], leaves, given, allow_unused=True)
        gradients = iter(found)
        made: list[Made | None] = []
        seen: dict[int, int] = {}
        for place, tensor in enumerate(inputs):
            gradient = next(gradients) if tensor.requires_grad else None
            if gradient is None:
                made.append(None)
                continue
            shares = of.get(memory(gradient))
            if shares is None and memory(gradient) in seen:
                shares = -1 - seen[memory(gradient)]
            size = 0 if shares is not None else ROUNDED[self.device](gradient.untyped_storage().nbytes())
            made.append(Made(size, gradient.stride(), shares))
            seen.setdefault(memory(gradient), place)
        return Backward(tuple(made), tally.peak - before)


def writes_first(node: Node) -> bool:
    """Whether a call writes to the first tensor that it is given; norms write to buffers alone."""
    return bool(node.writes) and not fact_of(node).buffers


def memory(tensor: Tensor) -> int:
    """The same number for tensors in the same memory."""
    return tensor.untyped_storage()._cdata


def contiguous(shape: Sequence[int]) -> Strides:
    """The strides of a contiguous tensor.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def effects(graph: Graph, wanted: Collection[Place], device: str = "cuda") -> tuple[Effect, ...]:
    """The effect of each node of a graph, in order; gradients come in at the graph's outputs."""
    dry = Dry(device)
    at: dict[Place, Made] = {(v.name, 0): Made(0, contiguous(v.shape)) for v in (*graph.inputs, *graph.parameters)}
    forward: list[tuple[Forward, tuple[Made, ...]]] = []
    for node in graph.nodes:
        given = tuple(at[read] for read in node.reads)
        found = dry.forward(node, wanted, given)
        forward.append((found, given))
        at |= {(node.id, pick): made for pick, made in enumerate(found.outputs)}
    shapes: dict[Place, tuple[int, ...]] = {
        (node.id, pick): shape for node in graph.nodes for pick, shape in enumerate(node.output_shapes)
    }
    coming: dict[Place, Strides] = {
        (o.source, o.pick): contiguous(o.shape) for o in graph.outputs if (o.source, o.pick) in wanted
    }
    backward: list[Backward | None] = [None] * len(graph.nodes)
    incoming: list[tuple[Strides | None, ...]] = [()] * len(graph.nodes)
    for node in reversed(graph.nodes):
        gradients = tuple(coming.get((node.id, pick)) for pick in range(len(node.output_shapes)))
        incoming[node.id] = gradients
        if any(g is not None for g in gradients) and any(read in wanted for read in node.reads):
            found = dry.backward(node, wanted, forward[node.id][1], gradients)
            backward[node.id] = found
            for read, made in zip(node.reads, found.gradients, strict=True):
                if made is not None and isinstance(read[0], int):
                    # a sum of gradients is contiguous
                    coming[read] = contiguous(shapes[read]) if read in coming else made.strides
    return tuple(
        Effect(ahead, back, tuple(made.strides for made in given), grads)
        for (ahead, given), back, grads in zip(forward, backward, incoming, strict=True)
    )
