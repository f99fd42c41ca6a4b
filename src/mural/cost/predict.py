"""Predicted times of the calls of a graph, and of whole steps.

A call's own time comes from the fitted model. Added to it is what shapes alone do not tell: copies of tensors
that are not contiguous, and sums of gradients that come from several readers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import log2, prod

from mural.cost.call_features import KINDS, CallFeatures, work_of
from mural.cost.fitted_model import Model
from mural.cost.memory_effects import Effect, contiguous, effects
from mural.cost.replay import name_of
from mural.graph import Graph, Node
from mural.graph.differentiable import differentiable
from mural.graph.nodes import Place

ORDERED = frozenset([
    "conv", "transposed", "linear", "matmul", "batch_norm", "instance_norm", "group_norm", "layer_norm", "softmax",
    "max_pool", "avg_pool", "interpolate", "loss",
])  # fmt: skip
"""Families whose kernels first bring their values into order."""
EVEN = frozenset(["add", "multiply", "pointwise"])
"""Families whose kernels read several tensors side by side: an order that differs among them costs a pass."""


@dataclass(frozen=True)
class Times:
    """Seconds of each node, forward and backward, on the device itself; and of the host if it works concurrently."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    host_forward: tuple[float, ...] = ()
    host_backward: tuple[float, ...] = ()

    def step(self) -> tuple[float, float]:
        """Seconds of forward and backward by the clock, each begun with an idle device and ended with one."""
        ahead, back = self.shares()
        return sum(ahead), sum(back)

    def shares(self) -> tuple[list[float], list[float]]:
        """How much later forward and backward end for each node; the sums are the times by the clock."""
        ahead = queued(self.host_forward, self.forward)
        return ahead, queued(self.host_backward[::-1], self.backward[::-1])[::-1]


def queued(host: Sequence[float], device: Sequence[float]) -> list[float]:
    """How much later all is done for each call, if the host queues them and the device runs them in order.

        host     ├─1─┼─2─┼─3─┤
        device       ├─1─┤   ├─3───┤     (2 takes the device no time)

    >>> queued((1, 1, 1), (1, 0, 2)), queued((), (1, 2)), queued((1, 1), (5, 5))
    ([2, 0, 3], [1, 2], [6, 5])
    """
    if not host:
        return list(device)
    issued = done = 0
    found: list[float] = []
    for own, work in zip(host, device, strict=True):
        before = done
        issued += own
        done = max(done, issued) + work
        found.append(done - before)
    return found


def times(
    graph: Graph, model: Model, wanted: Collection[Place] | None = None, known: Sequence[Effect] | None = None
) -> Times:
    """The times of all nodes of a graph on the device of a model.

    `wanted` are the tensors that have gradients (those of parameters and all that is made of them, unless given),
    `known` the effects of the nodes, where they were found before.
    """
    wanted = differentiable(graph) if wanted is None else wanted
    known = effects(graph, wanted, model.kind) if known is None else known
    works = [work_of(node, wanted) for node in graph.nodes]
    forward = model.seconds(works, "forward")
    backward = model.seconds(works, "backward")
    beside: tuple[list[tuple[int, CallFeatures]], list[tuple[int, CallFeatures]]] = ([], [])
    heard: set[Place] = set()
    for node in reversed(graph.nodes):
        effect = known[node.id]
        if effect.backward is None or effect.backward.peak == 0:
            backward[node.id] = 0.0  # it only hands on what came in, as a sum or a join does
        beside[0].extend((node.id, copy) for copy in copies_ahead(node, works[node.id], effect))
        beside[1].extend((node.id, copy) for copy in copies_back(node, works[node.id], effect))
        beside[1].extend((node.id, total) for total in sums(node, effect, heard))
    for into, more in zip((forward, backward), beside, strict=True):
        for (place, _), seconds in zip(more, model.seconds([work for _, work in more], "forward"), strict=True):
            into[place] += seconds
    if not model.host:
        return Times(tuple(forward), tuple(backward))
    ahead, back = hosts(graph, works, known, model)
    return Times(tuple(forward), tuple(backward), ahead, back)


def copies_ahead(node: Node, work: CallFeatures, effect: Effect) -> list[CallFeatures]:
    """The copies that a forward call makes in addition to its own work."""
    if work.family == "view":
        return [move(made.bytes, node) for made in effect.forward.outputs if made.bytes]
    found: list[CallFeatures] = []
    order: set[tuple[int, ...]] = set()
    for shape, dtype, strides in zip(node.input_shapes, node.input_dtypes, effect.strides, strict=True):
        order.add(arranged(shape, strides))
        if work.family in ORDERED and not in_order(shape, strides):
            found.append(move(prod(shape) * dtype.itemsize, node))
    whole = [s for s in node.input_shapes if s == node.output_shapes[0]]
    if work.family in EVEN and len(whole) > 1 and len(order) > 1:
        found.append(move(work.written, node))
    return found


def copies_back(node: Node, work: CallFeatures, effect: Effect) -> list[CallFeatures]:
    """The copies that a backward call makes in addition to its own work."""
    if effect.backward is None:
        return []
    if work.family == "view":
        made = sum(gradient.bytes for gradient in effect.backward.gradients if gradient is not None)
        return [move(made, node)] if made else []
    if work.family == "pointwise" and node.writes:
        # Writing to a view, autograd copies the whole of it back and forth.
        made = sum(gradient.bytes for gradient in effect.backward.gradients if gradient is not None)
        more = effect.backward.peak - made
        return [move(more, node)] * 2 if more > made // 2 else []
    if work.family not in ORDERED:
        return []
    outputs = zip(node.output_shapes, node.dtypes, effect.incoming, strict=True)
    return [
        move(prod(shape) * dtype.itemsize, node)
        for shape, dtype, strides in outputs
        if strides is not None and not in_order(shape, strides)
    ]


def sums(node: Node, effect: Effect, heard: set[Place]) -> list[CallFeatures]:
    """The sums of this call's gradients and those that came before for the same tensors."""
    found: list[CallFeatures] = []
    if effect.backward is not None:
        for at, shape, dtype, made in zip(
            node.reads, node.input_shapes, node.input_dtypes, effect.backward.gradients, strict=True
        ):
            if made is not None and at in heard:
                size = prod(shape) * dtype.itemsize
                found.append(plain_work("add", 2 * size, size, name_of(dtype), shape))
            if made is not None:
                heard.add(at)
    return found


def in_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor is contiguous; dims of extent 1 may have any stride."""
    return all(e == 1 or a == b for e, a, b in zip(shape, strides, contiguous(shape), strict=True))


def arranged(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The dims from the slowest to the fastest.

    >>> arranged((2, 3, 4, 5), (60, 1, 15, 3)), arranged((2, 3, 1), (3, 1, 1))
    ((0, 2, 3, 1), (0, 1))
    """
    return tuple(sorted((d for d, extent in enumerate(shape) if extent > 1), key=lambda d: (-strides[d], d)))


def move(size: int, node: Node) -> CallFeatures:
    """The work of copying that many bytes into order."""
    return plain_work("copy", size, size, name_of(node.dtypes[0]), node.output_shapes[0])


def plain_work(family: str, read: int, written: int, dtype: str, shape: Sequence[int]) -> CallFeatures:
    """The work of a copy or a sum that is not in the graph."""
    half = dtype in ("bfloat16", "float16")
    features = {
        "read": log2(read) if read else 0.0,
        "written": log2(written) if written else 0.0,
        "inputs": 2.0 if family == "add" else 1.0,
        "gradient": 1.0,
        "half": float(half),
        "elements": log2(max(1, written // (2 if half else 4))),
        "broadcast": 0.0,
        "row": log2(shape[-1]) if shape and shape[-1] else 0.0,
        "relu": 0.0,
        "kind": float(KINDS.index("contiguous")) if family == "copy" else -1.0,
        "each": log2(shape[1]) if len(shape) > 1 and shape[1] else 0.0,
        "operations": 0.0,
    }
    return CallFeatures(family, dtype, 0.0, read, written, features)


HOSTS: dict[str, str] = {"add": "binary", "multiply": "binary", "loss": "softmax", "mean": "mean"}
"""The chain used for a family, where it has another name."""


def hosts(
    graph: Graph, works: Sequence[CallFeatures], known: Sequence[Effect], model: Model
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of the host for each call, forward and backward; what gives back what it got starts no kernel."""
    ahead: list[float] = []
    back: list[float] = []
    for node, work, effect in zip(graph.nodes, works, known, strict=True):
        name = HOSTS.get(work.family, work.family)
        if work.family == "conv" and work.features.get("bias"):
            name = "conv with bias"
        pair = model.host.get(name) or model.host["pointwise"]
        ahead.append(pair[0])
        back.append(pair[1] if effect.backward is not None and not node.idle else 0.0)
    return tuple(ahead), tuple(back)
