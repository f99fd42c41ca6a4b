"""Tiles: pieces of a tensor that come one after the other on one device, as sharded tensors.

A tile is the middle piece of a mesh of three along every axis: what is before it and after it comes at another time, as
the pieces of other micro-batches do. So every rule of the table serves tiles as it serves ranks:

    before │ the tile │ after         a windowed rule runs valid on what the tile holds,
    ───────┼──────────┼──────         a pointwise one on the tile, and what looks at everything
           a          b               asks the `TileRun` for the total over all tiles.

What a windowed rule computes is decided by the run (`out`), since only it knows which outputs later layers need.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from mural.comm.messages import Transport
from mural.errors import UnsupportedOp
from mural.geometry import Box, Cuts, Interval, Reads, slices
from mural.ranks.mesh import AXES, SPATIAL, Mesh
from mural.shard.folds.regroup import Folds
from mural.shard.layout import Layout, Want
from mural.shard.parts import cut_out
from mural.shard.tensor import ShardedTensor

Spans = Mapping[str, Interval]
"""An interval for each mesh axis that cuts a tensor."""


class OwnMoments(Protocol):
    """What a norm measures of the own part of a tile."""

    @property
    def values(self) -> Tensor:
        """The own part."""
        ...

    def moments(self) -> Tensor:
        """Count, mean and sum of squared deviations of each group: (3, groups)."""
        ...

    def merged(self, parts: Tensor) -> Tensor:
        """The moments of everything, from those of all tiles."""
        ...

    def gradient(self, adjoint: Tensor, statistics: Tensor) -> Tensor:
        """The gradient of the values, from that of the statistics of everything."""
        ...

    def learn(self, statistics: Tensor) -> None:
        """Update running buffers; to be called once."""
        ...

    def without_values(self) -> OwnMoments:
        """The same, without the memory of the tile."""
        ...


class TileRun(Protocol):
    """Whoever runs calls on tiles: says what they compute, and knows the totals over all tiles."""

    def out(self, layout: Layout, dims: Sequence[Reads], name: str) -> Spans:
        """The outputs that a windowed rule is to compute."""
        ...

    def own(self, layout: Layout) -> Box:
        """The positions of a tensor that belong to this tile alone: those of all tiles are the tensor."""
        ...

    def total(self, part: Tensor, axes: Sequence[str], name: str) -> Tensor:
        """The sum of the parts of all tiles along the axes."""
        ...

    def statistics(self, own: Callable[[], OwnMoments], axes: Sequence[str]) -> Tensor:
        """Means and variances over all tiles along the axes, (2, groups), of what each measures of its own part.

        A tile holds all of its own part only where it is to be measured: `own` is asked there alone.
        """
        ...


_runs: list[TileRun] = []
"""One for all threads: a checkpoint may recompute its region in a thread of the autograd engine."""


@contextmanager
def tile_run(run: TileRun) -> Generator[None]:
    """In this block, calls on tiles ask this run."""
    _runs.append(run)
    try:
        yield
    finally:
        _runs.pop()


def current_run() -> TileRun:
    """The run that calls on tiles ask."""
    if not _runs:
        raise UnsupportedOp("a tile was used after its step: tiles are there only while a streamed step runs")
    return _runs[-1]


def computing_tiles() -> bool:
    """Whether calls are on tiles."""
    return bool(_runs)


@lru_cache(maxsize=64)
def tile_mesh(rank: int = 0) -> Mesh:
    """The mesh of one tile: itself in the middle, other times around it."""
    sizes = tuple(3 if axis in ("data", *SPATIAL) else 1 for axis in AXES)
    middle = 3 ** (1 + len(SPATIAL)) // 2
    ranks = tuple(rank if i == middle else -1 - i for i in range(2 * middle + 1))
    return Mesh(sizes, rank, len(SPATIAL), Transport(None, 0.0), ranks, tiled=True)


def around(span: Interval, extent: int) -> Cuts:
    """The cuts of a dim of which a tile holds an interval."""
    return Cuts.of((0, span.start, span.stop, extent))


def tile_of(
    local: Tensor, shape: Sequence[int], axes: Sequence[str | None], spans: Spans, folds: Folds = ()
) -> ShardedTensor:
    """A tensor of a global shape of which a tile holds these spans."""
    cuts = tuple(
        around(spans[a], n) if a is not None and a in spans else None for n, a in zip(shape, axes, strict=True)
    )
    kept = tuple(a if c is not None else None for a, c in zip(axes, cuts, strict=True))
    return ShardedTensor(local, Layout(tile_mesh(), tuple(shape), kept, cuts, ()), "", folds)


def spans_of(layout: Layout) -> dict[str, Interval]:
    """What a tile holds, for each axis that cuts it."""
    return {a: i for a, c, i in zip(layout.axes, layout.cuts, layout.box, strict=True) if a and c is not None}


def cropped(x: ShardedTensor, spans: Spans, written: bool = False, dense: bool = True) -> ShardedTensor:
    """The part of a tile at those spans; other axes stay as they are. One that is `written` to is a view."""
    layout = x.placement
    box = tuple(spans.get(a or "", i) if c is not None else i
                for a, c, i in zip(layout.axes, layout.cuts, layout.box, strict=True))  # fmt: skip
    if box == layout.box:
        return x
    part = inside(box, layout, "a crop")
    local = x.local[part] if written else cut_out(x.local, part, dense)
    return ShardedTensor(local, at_box(layout, box), x.aliased, x.folds)


def at_box(layout: Layout, box: Box) -> Layout:
    """The layout of another part of the same tensor."""
    cuts = tuple(c if c is None else around(i, n) for c, i, n in zip(layout.cuts, box, layout.shape, strict=True))
    return replace(layout, cuts=cuts)


def inside(box: Box, layout: Layout, name: str) -> tuple[slice, ...]:
    """The slices of a box in a tile; raises where the tile does not hold it."""
    if not all(held.contains(part) or part.size == 0 for part, held in zip(box, layout.box, strict=True)):
        raise UnsupportedOp(
            f"{name} of shape {layout.shape} reads {show(box)}, but its tile holds {show(layout.box)}: it is not local"
        )
    held = layout.box
    return slices([i if i.size else Interval(h.start, h.start) for i, h in zip(box, held, strict=True)], held)


def show(box: Box) -> str:
    """A box as it is written in Python.

    >>> show((Interval(0, 2), Interval(3, 5)))
    '[0:2, 3:5]'
    """
    return f"[{', '.join(f'{i.start}:{i.stop}' for i in box)}]"


def pull_tile(x: ShardedTensor, wants: tuple[Want, ...], name: str) -> Tensor:
    """The part of a tile that is wanted, as far as the tile holds it."""
    at = x.mesh.coordinates
    mine = [intervals[at[axis] if axis is not None else 0] for axis, intervals in wants]
    if any(len(parts) != 1 for parts in mine):
        raise UnsupportedOp(f"{name} of shape {x.placement.shape} reads several places: it is not local")
    return cut_out(x.local, inside(tuple(part for (part,) in mine), x.placement, name))


def common_tile(sharded: Sequence[ShardedTensor], shape: tuple[int, ...]) -> Layout:
    """The layout of a pointwise result of tiles: what all of them hold."""
    axes: list[str | None] = [None] * len(shape)
    spans: dict[int, Interval] = {}
    for tensor in sharded:
        layout = tensor.placement
        for dim, out in enumerate(range(len(shape) - layout.ndim, len(shape))):
            if layout.cuts[dim] is None or layout.shape[dim] != shape[out]:
                continue
            if axes[out] not in (None, layout.axes[dim]):
                raise UnsupportedOp(f"tiles of {axes[out]} and {layout.axes[dim]} meet in dim {out} of {shape}")
            axes[out], box = layout.axes[dim], layout.box[dim]
            spans[out] = spans[out] & box if out in spans else box
    cut = [axis for axis in axes if axis is not None]
    if len(set(cut)) != len(cut):
        raise UnsupportedOp(f"tiles of {cut} meet in a result of shape {shape}: an axis cuts one dim")
    cuts = tuple(around(spans[d], n) if d in spans else None for d, n in enumerate(shape))
    return Layout(sharded[0].mesh, shape, tuple(axes), cuts, ())
