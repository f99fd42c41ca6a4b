"""The calls of a model as they run on tiles: what each reads, and what it asks of all tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import UnsupportedOp
from mural.geometry import Reads
from mural.graph.nodes import Graph, Node, Place, Ref
from mural.graph.without_memory import META, staying, staying_named
from mural.ranks.mesh import SPATIAL
from mural.shard.folds.regroup import Folds

Axes = tuple[str | None, ...]
"""The mesh axis of each dim of a tensor, None for dims that are never cut."""
TileWindow = tuple[tuple[str, Reads], ...]
"""What one windowed rule reads along each axis."""


@dataclass(frozen=True)
class TileValue:
    """A tensor of the graph: its axes, and whether it comes in tiles.

    Where dims were merged (`folds`, as of sharded tensors), shape and axes are those of the dims underneath.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes = ()
    gradient: bool = False
    folds: Folds = ()

    @property
    def extents(self) -> dict[str, int]:
        """The extent along each axis that cuts it."""
        return {a: n for a, n in zip(self.axes, self.shape, strict=False) if a is not None}

    @property
    def tiled(self) -> bool:
        """Whether it comes in tiles of the image, and not only image by image."""
        return any(a in SPATIAL for a in self.axes)


@dataclass(frozen=True)
class CallForm:
    """The arguments of a recorded call, flat: where its tensors go, and where it names a device."""

    op: str
    func: Any
    leaves: tuple[Any, ...]
    form: Any
    refs: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]

    @classmethod
    def of(cls, node: Node) -> CallForm:
        """The form of a node's call."""
        if node.func is None:
            raise UnsupportedOp(f"{node.op} at {node.site!r} cannot be called again")
        leaves, form = pytree.tree_flatten((node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Ref))
        refs = tuple((i, leaf.index) for i, leaf in enumerate(leaves) if isinstance(leaf, Ref))
        devices = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.device) and leaf == META)
        return cls(node.op, node.func, tuple(leaves), form, refs, devices)

    def call(self, given: Sequence[Any], device: torch.device) -> Any:
        """What the call returns for these tensors."""
        leaves = list(self.leaves)
        for place, index in self.refs:
            leaves[place] = given[index]
        for place in self.devices:  # what was captured without memory asked for tensors without memory
            leaves[place] = device
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        if device.type == "meta":
            args, kwargs = staying(self.op, args), staying_named(kwargs)
        return self.func(*args, **kwargs)


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
    random: int = 0
    """How many keys it draws."""
    plain: bool = False
    beside: bool = False
    """Whether each window gives a result of its own; otherwise they follow each other."""
    refused: str = ""

    @cached_property
    def form(self) -> CallForm:
        """The call, to be made again."""
        return CallForm.of(self.node)

    @property
    def rounds(self) -> int:
        """How many passes it takes to know all of its totals."""
        return 1 + max(self.levels) if self.levels else 0


@dataclass(frozen=True)
class TileGraph:
    """The calls of a graph, and all its tensors, by place."""

    graph: Graph
    calls: tuple[TileCall, ...]
    values: Mapping[Place, TileValue]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the results of a call."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
