"""Layouts: the global place of every rank's piece of a tensor, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from mural.comm.exchange import ExchangeRoute
from mural.errors import LayoutError
from mural.geometry import Box, Cuts, Interval, Needs
from mural.ranks.mesh import Mesh

P = ParamSpec("P")
T = TypeVar("T")

MIN_EXTENT = 2
"""A windowed operation's output with fewer positions per rank than this becomes replicated along that dim."""

Want = tuple[str | None, tuple[tuple[Interval, ...], ...]]
"""The needs along one dim: the intervals for each coordinate of a mesh axis (or for all, axis None)."""


@dataclass(frozen=True)
class Layout:
    """How a tensor of a global shape is distributed: each dim cut along at most one mesh axis, or replicated.

    `axes` names the mesh axis that a dim belongs to even while it is replicated, and `images` keeps the
    image's own cuts of that axis, so that a dim that was too small to cut is cut again once it grows.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    cuts: tuple[Cuts | None, ...]
    images: tuple[tuple[str, Cuts], ...]

    def __post_init__(self) -> None:
        cut = self.axes_of(range(self.ndim))
        if len(set(cut)) != len(cut):
            raise LayoutError(
                f"a tensor of shape {self.shape} cannot be cut along {cut}: an axis of the mesh cuts one dim. Call "
                f".full() on one of the operands, or cut them along the same dims"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.shape, self.axes, self.cuts, self.images))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """The dims that are cut into several parts."""
        return tuple(d for d in range(self.ndim) if self.is_cut(d))

    def is_cut(self, dim: int) -> bool:
        """Whether ranks hold different parts of a dim."""
        cuts = self.cuts[dim]
        return cuts is not None and cuts.parts > 1

    @cached_property
    def thin(self) -> bool:
        """Whether some rank's piece has fewer than two positions along a dim that has more."""
        sizes = ((n, i.size) for n, c in zip(self.shape, self.cuts, strict=True) if c for i in c.intervals())
        return any(size < min(2, n) for n, size in sizes)

    @cached_property
    def box(self) -> Box:
        """The global place of this rank's piece."""
        return self.box_at(self.mesh.coordinates)

    def box_at(self, coordinates: Mapping[str, int]) -> Box:
        """The global place of the piece at some coordinates of the mesh."""
        return tuple(
            Interval(0, extent) if cuts is None else cuts.interval(coordinates[axis or ""])
            for extent, cuts, axis in zip(self.shape, self.cuts, self.axes, strict=True)
        )

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        return tuple(interval.size for interval in self.box)

    @cached_property
    def size(self) -> torch.Size:
        """The global shape, as torch gives it."""
        return torch.Size(self.shape)

    def axes_of(self, dims: Iterable[int]) -> tuple[str, ...]:
        """The mesh axes that cut those dims."""
        return tuple(axis for d in dims if self.is_cut(d) and (axis := self.axes[d]) is not None)

    def cut_for(self, dim: int, extent: int) -> Cuts | None:
        """How a windowed operation's output of that extent is cut: the image's proportions, or not at all."""
        image = dict(self.images).get(self.axes[dim] or "")
        if image is None or (image.parts > 1 and extent < MIN_EXTENT * image.parts):
            return None
        return image.scaled(extent)

    def resized(self, extents: Mapping[int, int]) -> Layout:
        """The layout of a windowed operation's output: some dims have other extents and the image's cuts."""
        return _resized(self, tuple(extents.items()))

    def gathered(self, dims: Iterable[int]) -> Layout:
        """The layout with some dims replicated."""
        return _gathered(self, tuple(dims))

    def with_cut(self, dim: int, cuts: Cuts | None, extent: int) -> Layout:
        """The layout with one dim's extent and cuts replaced."""
        return _with_cut(self, dim, cuts, extent)

    def uncut_resized(self, shape: Sequence[int]) -> Layout:
        """The layout of a local result of that local shape: cut dims keep their extent, others take the local one."""
        return _uncut_resized(self, tuple(shape))

    def pick(self, dims: Sequence[int | None], shape: Sequence[int]) -> Layout:
        """The layout whose dim i is this layout's dim dims[i] (None: a new, uncut dim of extent shape[i])."""
        return _picked(self, tuple(dims), tuple(shape))

    def wants(self) -> tuple[Want, ...]:
        """This layout as a need."""
        return tuple(
            (None, ((Interval(0, extent),),)) if cuts is None else (axis, tuple((i,) for i in cuts.intervals()))
            for extent, axis, cuts in zip(self.shape, self.axes, self.cuts, strict=True)
        )


def recurring(function: Callable[Concatenate[Layout, P], T]) -> Callable[Concatenate[Layout, P], T]:
    """The function of a layout, which remembers its results: layouts recur in every step, but for those of tiles.

    With one object for each layout, comparing them is comparing addresses, and a box is found once.
    """
    remembered = lru_cache(maxsize=16384)(function)

    @wraps(function)
    def found(layout: Layout, *args: P.args, **kwargs: P.kwargs) -> T:
        return (function if layout.mesh.tiled else remembered)(layout, *args, **kwargs)

    return found


@recurring
def _gathered(layout: Layout, dims: tuple[int, ...]) -> Layout:
    if all(layout.cuts[d] is None for d in dims):
        return layout
    return replace(layout, cuts=tuple(None if d in dims else c for d, c in enumerate(layout.cuts)))


@recurring
def _with_cut(layout: Layout, dim: int, cuts: Cuts | None, extent: int) -> Layout:
    shape = (*layout.shape[:dim], extent, *layout.shape[dim + 1 :])
    return replace(layout, shape=shape, cuts=(*layout.cuts[:dim], cuts, *layout.cuts[dim + 1 :]))


@recurring
def _picked(layout: Layout, dims: tuple[int | None, ...], shape: tuple[int, ...]) -> Layout:
    axes = tuple(None if d is None else layout.axes[d] for d in dims)
    cuts = tuple(None if d is None else layout.cuts[d] for d in dims)
    return replace(layout, shape=shape, axes=axes, cuts=cuts)


@recurring
def _resized(layout: Layout, extents: tuple[tuple[int, int], ...]) -> Layout:
    wanted = dict(extents)
    shape = tuple(wanted.get(d, n) for d, n in enumerate(layout.shape))
    cuts = tuple(layout.cut_for(d, wanted[d]) if d in wanted else c for d, c in enumerate(layout.cuts))
    return replace(layout, shape=shape, cuts=cuts)


@recurring
def _uncut_resized(layout: Layout, shape: tuple[int, ...]) -> Layout:
    whole = [c is None or c.parts == 1 for c in layout.cuts]
    extents = tuple(n if w else g for n, g, w in zip(shape, layout.shape, whole, strict=True))
    cuts = tuple(
        Cuts.of((0, n)) if c is not None and w and c.extent != n else c
        for n, c, w in zip(extents, layout.cuts, whole, strict=True)
    )
    return replace(layout, shape=extents, cuts=cuts)


def spatial_boxes(have: Layout, target: Layout, lead: int) -> tuple[dict[int, Box], dict[int, Box]]:
    """The input and output boxes of the dims from `lead` on, for every rank that shares this rank's images."""
    mesh = have.mesh
    at = {rank: mesh.coordinates_of(rank) for rank in mesh.peers(have.axes_of(range(lead, have.ndim)))}
    own = {rank: have.box_at(place)[lead:] for rank, place in at.items()}
    return own, {rank: target.box_at(place)[lead:] for rank, place in at.items()}


@lru_cache(maxsize=16384)
def route(have: Layout, wants: tuple[Want, ...]) -> ExchangeRoute:
    """This rank's part of the exchange that brings all ranks from a layout to what they need."""
    mesh = have.mesh
    # Ranks that differ only along the cutting axes hold disjoint boxes, and only they exchange.
    peers = mesh.peers(have.axes_of(range(have.ndim)))
    places = {rank: mesh.coordinates_of(rank) for rank in peers}
    owned = {rank: have.box_at(at) for rank, at in places.items()}
    needed: dict[int, Needs] = {
        rank: tuple(intervals[at[axis] if axis is not None else 0] for axis, intervals in wants)
        for rank, at in places.items()
    }
    return ExchangeRoute.of(mesh.rank, owned, needed)
