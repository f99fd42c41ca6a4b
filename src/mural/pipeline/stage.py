"""What a stage runs: its part of the model's forward, or the model itself where there is one stage alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from mural.graph.follow import Follower
from mural.graph.script import Key, Script
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.shard.generators import generators_kept, random_state, set_random_state
from mural.shard.gradient_scale import raw_gradient, require_gradient, true_gradient
from mural.shard.layout import Layout

# -- what a stage runs -------------------------------------------------------------------------------------------------


Values = dict[Key, Tensor]


class StagePart(Protocol):
    """A stage's part of a model."""

    @property
    def takes(self) -> tuple[Key, ...]:
        """What it takes from other stages, and of the model's inputs."""
        ...

    def __call__(self, given: Mapping[Key, Tensor], device: torch.device) -> tuple[Values, Any]:
        """What it gives to other stages, and the model's result on the last stage."""
        ...


@dataclass(frozen=True)
class WholeModel:
    """The model itself, which takes that many inputs."""

    model: nn.Module
    inputs: int

    @property
    def takes(self) -> tuple[Key, ...]:
        """All inputs."""
        return tuple((f"input {i}", 0) for i in range(self.inputs))

    def __call__(self, given: Mapping[Key, Tensor], device: torch.device) -> tuple[Values, Any]:
        """Nothing for others, and the model's result."""
        return {}, self.model(*(given[key] for key in self.takes))


@dataclass(frozen=True)
class CutPart:
    """One stage of a model that is cut."""

    model: nn.Module
    script: Script
    stage: int
    paths: Mapping[int, str]

    @property
    def takes(self) -> tuple[Key, ...]:
        """What it takes from other stages, and of the model's inputs."""
        return self.script.stretches[self.stage].takes

    def __call__(self, given: Mapping[Key, Tensor], device: torch.device) -> tuple[Values, Any]:
        """What it gives to other stages, and the model's result on the last stage."""
        follower = Follower(self.script, self.stage, given, device, self.paths)
        result = follower.run(self.model)
        last = self.stage == len(self.script.stretches) - 1
        return follower.made, result if last else None


# -- the stage at work -------------------------------------------------------------------------------------------------


Scope = Callable[[], Any]
Run = Callable[[], AbstractContextManager[None]]


@dataclass
class KeptForBackward:
    """What a stage keeps of a micro-batch between forward and backward."""

    leaves: dict[Key, Tensor]
    roots: dict[Key, tuple[Any, Layout | None]] = field(default_factory=dict[Key, tuple[Any, Layout | None]])
    state: Tensor | None = None
    """The random state at its beginning, where the forward is run again."""
    result: Any = None


class Stage:
    """One stage of one replica on this rank's seat.

    `scope` holds while the stage computes: precision, whose statistics batch norm takes. With `recompute`, forward
    keeps what the stage takes, and backward runs forward again.
    """

    def __init__(self, part: StagePart, mesh: Mesh, scope: Scope, device: torch.device, recompute: bool = False):
        self.part, self.mesh, self.scope, self.device, self.recompute = part, mesh, scope, device, recompute
        self.kept: dict[int, KeptForBackward] = {}
        self.aside: list[tuple[Tensor, Tensor]] = []
        """Buffers, and those that this replica uses in their place."""
        self.first: Run = nullcontext
        self.second: Run = nullcontext
        self.third: Run = nullcontext
        """What holds around a run, around one that is computed again, and around a backward."""

    def forward(self, microbatch: int, given: Mapping[Key, Tensor], wanted: set[Key]) -> Any:
        """What the stage gives to others by key, and its result if it is the last; `wanted` are leaves with gradients.

        The random state of the caller is the one that the stage's numbers are drawn from.
        """
        leaves = {key: leaf(value) if key in wanted else value for key, value in given.items()}
        kept = KeptForBackward(leaves)
        keeps = torch.is_grad_enabled()
        with ExitStack() as stack:
            if keeps and self.recompute:
                kept.state = random_state(self.device)
                stack.enter_context(torch.no_grad())
            stack.enter_context(self.first())
            values, result = self._run(leaves)
        if keeps:
            self.kept[microbatch] = kept
            if self.recompute:
                kept.result = None
            else:
                self._root(kept, values, result)
        return values, result

    def _run(self, leaves: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], Any]:
        with self.scope(), swapped(self.aside):
            return self.part(leaves, self.device)

    def _root(self, kept: KeptForBackward, values: Mapping[Key, Tensor], result: Any) -> None:
        kept.result = result
        for key, value in values.items():
            carrier = value.local if isinstance(value, ShardedTensor) else value
            # A view that was made under no_grad says that it requires a gradient, and has no history.
            if carrier.requires_grad and not (carrier.grad_fn is None and carrier._is_view()):
                place = value.placement if isinstance(value, ShardedTensor) else None
                kept.roots[key] = (get_gradient_edge(carrier), place)

    def again(self, microbatch: int) -> Any:
        """The result of the last stage with its history; where forward has to be run again, this does it."""
        kept = self.kept[microbatch]
        if kept.state is not None:
            with generators_kept(self.device), self.second(), held_buffers(beside for _, beside in self.aside):
                set_random_state(kept.state, self.device)
                values, result = self._run(kept.leaves)
            kept.state = None
            self._root(kept, values, result)
        return kept.result

    def backward(
        self, microbatch: int, grads: dict[Key, Tensor], ends: Iterable[tuple[Tensor, Tensor | None]]
    ) -> tuple[dict[Key, Tensor], set[Key]]:
        """The true gradients of what the stage took, from those of what it gave; `ends` are more tensors to start from.

        Gradients of parameters are added to `.grad` as backward does. The given gradients are taken out of `grads`. The
        set has what backward came to.
        """
        self.again(microbatch)
        kept = self.kept.pop(microbatch)
        roots: list[Any] = []
        seeds: list[Tensor | None] = []
        for key, (edge, place) in kept.roots.items():
            if key in grads:
                roots.append(edge)
                grad = grads.pop(key)
                seeds.append(raw_gradient(grad, place) if place is not None else grad)
                del grad
        for tensor, seed in ends:
            roots.append(tensor)
            seeds.append(seed)
        if roots:
            with self.scope(), self.third():
                torch.autograd.backward(roots, seeds)
        wanted = {key: value for key, value in kept.leaves.items() if needs(value)}
        reached = {key for key, value in wanted.items() if grad_of(value) is not None}
        return {key: self._gradient(value) for key, value in wanted.items()}, reached

    def _gradient(self, value: Tensor) -> Tensor:
        """The true gradient of a leaf; zeros where backward did not reach it."""
        found = grad_of(value)
        if isinstance(value, ShardedTensor):
            return torch.zeros_like(value.local) if found is None else found
        raw = torch.zeros_like(value) if found is None else found
        shape = tuple(value.shape)
        none = (None,) * len(shape)
        return true_gradient(raw, Layout(self.mesh, shape, none, none, ()))

    def forget(self) -> None:
        """Release everything."""
        self.kept.clear()


def needs(value: Tensor) -> bool:
    """Whether a leaf wants a gradient."""
    return value.local.requires_grad if isinstance(value, ShardedTensor) else value.requires_grad


def grad_of(value: Tensor) -> Tensor | None:
    """The gradient that this rank's piece holds; none where it goes on to an image that the user gave."""
    piece = value.local if isinstance(value, ShardedTensor) else value
    return piece.grad if piece.is_leaf or piece.retains_grad else None


def leaf(value: Tensor) -> Tensor:
    """The tensor as the beginning of a history of its own; its gradient arrives with the true scale."""
    if isinstance(value, ShardedTensor):
        return require_gradient(ShardedTensor(value.local.detach(), value.placement, "", value.folds))
    return value.detach().requires_grad_()


@contextmanager
def swapped(pairs: Iterable[tuple[Tensor, Tensor]]) -> Generator[None]:
    """The values of some buffers exchanged with those of others."""
    pairs = list(pairs)

    def swap() -> None:
        for one, other in pairs:
            kept = one.clone()
            one.data.copy_(other)  # not seen by autograd, as torch's own norms move them
            other.data.copy_(kept)

    swap()
    try:
        yield
    finally:
        swap()


@contextmanager
def held_buffers(buffers: Iterable[Tensor]) -> Generator[None]:
    """Give buffers their values back: what is computed again counts once."""
    buffers = list(buffers)
    before = [b.detach().clone() for b in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # not seen by autograd, as torch's own norms move them
