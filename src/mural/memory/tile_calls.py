"""The calls of a model as they run on tiles: what each reads, and what it asks of all tiles."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import UnsupportedOp
from mural.geometry import Box, Interval, Reads
from mural.graph.nodes import Graph, Node, Place, Ref
from mural.graph.without_memory import META, staying, staying_named
from mural.graph.work_and_depth import node_costs
from mural.ranks.mesh import SPATIAL
from mural.shard.folds.regroup import Folds

Axes = tuple[str | None, ...]
"""The mesh axis of each dim of a tensor, None for dims that are never cut."""
TileWindow = tuple[tuple[str, Reads], ...]
"""What one windowed rule reads along each axis."""


@dataclass(frozen=True)
class TileValue:
    """A tensor of the graph: its axes, and whether it comes in tiles.

    Where dims were merged (`folds`, as of sharded tensors), shape and axes are those of the dims underneath. A plain
    tensor has no axes; a sharded tensor that is not cut has None for each dim.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes = ()
    folds: Folds = ()

    @property
    def extents(self) -> dict[str, int]:
        """The extent along each axis that cuts it."""
        return {a: n for a, n in zip(self.axes, self.shape, strict=False) if a is not None}

    @property
    def tiled(self) -> bool:
        """Whether it comes in tiles of the image, and not only image by image."""
        return any(a in SPATIAL for a in self.axes)

    def box(self, spans: Mapping[str, Interval]) -> Box:
        """A box of all dims from the spans of the axes."""
        axes: Axes = self.axes or (None,) * len(self.shape)
        return tuple(spans[a] if a is not None and a in spans else Interval(0, n)
                     for a, n in zip(axes, self.shape, strict=True))  # fmt: skip


@dataclass(frozen=True)
class CallForm:
    """A recorded call, to be made again: its arguments, and which of them hold tensors or name a device."""

    op: str
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    places: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, node: Node) -> CallForm:
        """The form of a node's call."""
        if node.func is None:
            raise UnsupportedOp(f"{node.op} at {node.site!r} cannot be called again")
        places = tuple(i for i, item in enumerate(node.args) if varies(item))
        names = tuple(name for name, item in node.kwargs.items() if varies(item))
        return cls(node.op, node.func, node.args, dict(node.kwargs), places, names)

    def call(self, given: Sequence[Any], device: torch.device) -> Any:
        """What the call returns for these tensors."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for i in self.places:
            args[i] = filled(args[i], given, device)
        for name in self.names:
            kwargs[name] = filled(kwargs[name], given, device)
        if device.type != "meta":
            return self.func(*args, **kwargs)
        with META:  # where tensors are made that nothing says a device for
            return self.func(*staying(self.op, tuple(args)), **staying_named(self.op, tuple(args), kwargs))


def made_by(node: Node, result: Any, given: Sequence[Any]) -> dict[Place, Any]:
    """The tensors that a call made, by place; a call that returns nothing wrote to what it was given."""
    return dict(zip(node.makes, tensors_in(result) or [given[i] for i in node.returns], strict=True))


def varies(item: Any) -> bool:
    """Whether an argument holds a tensor, or asks for tensors without memory, as it was captured."""
    leaves = pytree.tree_leaves(item, is_leaf=lambda leaf: isinstance(leaf, Ref))
    return any(isinstance(leaf, Ref) or (isinstance(leaf, torch.device) and leaf == META) for leaf in leaves)


def filled(item: Any, given: Sequence[Any], device: torch.device) -> Any:
    """An argument with these tensors, and with the device that computes."""
    if isinstance(item, Ref):
        return given[item.index]
    if type(item) in (list, tuple):  # without the detour of pytree, which takes longer than a small layer
        return type(item)([filled(part, given, device) for part in item])
    if isinstance(item, torch.device):
        return device if item == META else item
    place = pytree.tree_map_only(Ref, lambda ref: given[ref.index], item)
    return pytree.tree_map_only(torch.device, lambda d: device if d == META else d, place)


AS_OUTSIDE = nullcontext()


def as_in_model(node: Node, device: torch.device) -> AbstractContextManager[Any]:
    """A block for a call that does what the model did around it: gradients turned off, autocast changed."""
    return changed_modes(node, device) if node.detached or node.casts else AS_OUTSIDE


@contextmanager
def changed_modes(node: Node, device: torch.device) -> Generator[None]:
    """A block with the modes of a call."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled() and not node.detached))
        for kind, enabled, dtype in node.casts:
            if kind == device.type:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield


@dataclass(frozen=True)
class TileCall:
    """One call: the windows that its rules read, one after the other, and the totals that it asks for.

    `levels` has a number for each total: how many others it needs first. `norm` says that the total is the statistics
    of a norm. `refused` says why it cannot run on tiles.
    """

    node: Node
    windows: tuple[TileWindow, ...] = ()
    levels: tuple[int, ...] = ()
    norm: bool = False
    keys: int | None = 0
    """How many keys of random layers it draws; None if it draws numbers by torch's own means, or may do so."""
    plain: bool = False
    beside: bool = False
    """Whether each window gives a result of its own; otherwise they follow each other."""
    shaped: bool = False
    """Whether it looks at what it is given for its type and place alone, along axes that its result may not have."""
    refused: str = ""
    spread: bool = False
    """Whether it makes zeros of which tiles only copy a part: one number serves for all of them."""

    def run(self, given: Sequence[Any], device: torch.device) -> Any:
        """What the call returns on a tile."""
        if not self.spread:
            return self.form.call(given, device)
        like = self.form.call(given, META)
        return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)

    @cached_property
    def form(self) -> CallForm:
        """The call, to be made again."""
        return CallForm.of(self.node)

    @property
    def random(self) -> bool:
        """Whether it draws random numbers, or may do so."""
        return self.keys != 0

    @property
    def rounds(self) -> int:
        """How many passes it takes to know all of its totals."""
        return 1 + max(self.levels) if self.levels else 0


@dataclass(frozen=True)
class TileGraph:
    """The calls of a graph, and all its tensors, by place; `effects` are its calls outside the dataflow."""

    graph: Graph
    calls: tuple[TileCall, ...]
    values: Mapping[Place, TileValue]
    effects: tuple[TileCall, ...] = ()

    @property
    def in_order(self) -> list[TileCall]:
        """All calls as the model makes them."""
        return sorted((*self.calls, *self.effects), key=lambda call: call.node.time)

    @cached_property
    def work(self) -> tuple[tuple[float, float], ...]:
        """Operations of each call on the whole image, forward and backward."""
        return tuple((each.result.work, each.backward.work) for each in node_costs(self.graph))


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the results of a call."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
