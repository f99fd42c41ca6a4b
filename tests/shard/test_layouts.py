"""Layouts as data, without processes: pieces cover a tensor once, and what is derived keeps each datum where it was."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mural.comm.messages import Transport
from mural.errors import LayoutError
from mural.geometry import Box, Cuts, Interval, slices
from mural.ranks import SPATIAL, Mesh
from mural.shard.layout import MIN_EXTENT, Layout, route, spatial_boxes

AXES = ("data", None, *SPATIAL)
TRANSPORT = Transport(None, 0.0)


def mesh_of(data: int, spatial: tuple[int, ...], rank: int = 0) -> Mesh:
    """A mesh as one of its ranks sees it; nobody sends anything."""
    return Mesh((data, 1, 1, 1, *spatial, *(1,) * (3 - len(spatial))), rank, len(spatial), TRANSPORT)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """The layout of images: uneven cuts, empty parts, some dims whole."""
    dims = draw(st.integers(1, 2))
    mesh = mesh_of(draw(st.integers(1, 2)), tuple(draw(st.integers(1, 3)) for _ in range(dims)))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(2 + dims))
    cuts: list[Cuts | None] = []
    for extent, axis in zip(shape, AXES, strict=False):
        parts = mesh.size(axis) if axis else 1
        bounds = sorted(draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)))
        cuts.append(Cuts.of((0, *bounds, extent)) if axis and (parts > 1 or draw(st.booleans())) else None)
    axes = AXES[: len(shape)]
    images = ((a, c) for a, c in zip(axes, cuts, strict=True) if a is not None and c is not None)
    return Layout(mesh, shape, axes, tuple(cuts), tuple(sorted(images)))


def ranks_of(layout: Layout) -> range:
    return range(layout.mesh.world)


def seen_by(layout: Layout, rank: int) -> Layout:
    """The same layout on another rank."""
    return replace(layout, mesh=replace(layout.mesh, rank=rank))


def boxes(layout: Layout) -> dict[int, Box]:
    return {rank: seen_by(layout, rank).box for rank in ranks_of(layout)}


def counted(layout: Layout) -> torch.Tensor:
    """How many ranks hold each position."""
    counts = torch.zeros(layout.shape, dtype=torch.int64)
    for box in boxes(layout).values():
        counts[slices(box)] += 1
    return counts


def copies(layout: Layout) -> int:
    """How many ranks hold the same piece: those along axes that cut nothing."""
    cutting = {layout.axes[d] for d, c in enumerate(layout.cuts) if c is not None and c.parts > 1}
    total = 1
    for axis in ("data", *SPATIAL):
        total *= 1 if axis in cutting else layout.mesh.size(axis)
    return total


@given(layouts())
def test_pieces_cover_a_tensor_as_often_as_there_are_copies(layout: Layout) -> None:
    assert bool((counted(layout) == copies(layout)).all())
    for rank in ranks_of(layout):
        mine = seen_by(layout, rank)
        assert mine.box == layout.box_at(layout.mesh.coordinates_of(rank))
        assert mine.local_shape == tuple(i.size for i in mine.box)
    assert layout.size == torch.Size(layout.shape)
    assert layout.ndim == len(layout.shape)


@given(layouts())
def test_cut_dims_are_those_in_several_parts(layout: Layout) -> None:
    several = [d for d, c in enumerate(layout.cuts) if c is not None and c.parts > 1]
    assert layout.cut_dims == tuple(several)
    assert [d for d in range(layout.ndim) if layout.is_cut(d)] == several
    assert layout.axes_of(range(layout.ndim)) == tuple(layout.axes[d] for d in several)
    assert layout.axes_of([0]) == (("data",) if 0 in several else ())
    assert layout.axes_of([]) == ()


@pytest.mark.parametrize(("extent", "bounds", "thin"), [
    (6, (0, 3, 6), False), (6, (0, 2, 6), False), (6, (0, 1, 6), True), (6, (0, 6, 6), True), (6, (0, 5, 6), True),
    (2, (0, 2, 2), True), (2, (0, 1, 2), True), (1, (0, 1, 1), True), (1, (0, 1), False), (2, (0, 2), False),
])  # fmt: skip
def test_thin_is_a_piece_of_less_than_two_positions(extent: int, bounds: tuple[int, ...], thin: bool) -> None:
    cuts = Cuts.of(bounds)
    mesh = mesh_of(1, (cuts.parts,))
    assert Layout(mesh, (5, extent), (None, "spatial0"), (None, cuts), ()).thin == thin
    assert not Layout(mesh, (1, 1), (None, "spatial0"), (None, None), ()).thin


def test_layouts_that_are_equal_have_one_hash() -> None:
    one, other = (Layout(mesh_of(1, (2,)), (4,), ("spatial0",), (Cuts.even(4, 2),), ()) for _ in range(2))
    assert hash(one) == hash(other)
    assert len({one, other, one.gathered([0])}) == 2


@pytest.mark.parametrize(("extent", "expected"), [
    (24, (0, 8, 24)), (12, (0, 4, 12)), (13, (0, 4, 13)), (14, (0, 5, 14)), (2 * MIN_EXTENT, (0, 1, 4)),
    (2 * MIN_EXTENT - 1, None), (1, None), (0, None),
])  # fmt: skip
def test_outputs_are_cut_as_the_image_unless_they_are_small(extent: int, expected: tuple[int, ...] | None) -> None:
    image = Cuts.of((0, 4, 12))
    axes, images = (None, "spatial0"), (("spatial0", image),)
    layout = Layout(mesh_of(1, (2,)), (1, 12), axes, (None, None), images)  # it is whole now, and cut as it grows
    found = layout.cut_for(1, extent)
    assert (None if found is None else found.bounds) == expected
    assert layout.resized({1: extent}).cuts == (None, found)
    assert layout.resized({1: extent}).shape == (1, extent)
    assert layout.cut_for(0, extent) is None


def test_an_axis_of_one_rank_is_never_too_small_to_cut() -> None:
    layout = Layout(mesh_of(1, (1,)), (8,), ("spatial0",), (Cuts.of((0, 8)),), (("spatial0", Cuts.of((0, 8))),))
    assert layout.resized({0: 1}).cuts == (Cuts.of((0, 1)),)


@given(layouts(), st.data())
def test_other_dims_stay_where_an_output_is_resized(layout: Layout, data: st.DataObject) -> None:
    dim, extent = data.draw(st.integers(2, layout.ndim - 1)), data.draw(st.integers(0, 20))
    found = layout.resized({dim: extent})
    assert found.shape == (*layout.shape[:dim], extent, *layout.shape[dim + 1 :])
    assert found.cuts == (*layout.cuts[:dim], layout.cut_for(dim, extent), *layout.cuts[dim + 1 :])
    assert (found.axes, found.images) == (layout.axes, layout.images)


@given(layouts(), st.data())
def test_gathered_dims_are_whole_on_every_rank(layout: Layout, data: st.DataObject) -> None:
    dims = data.draw(st.sets(st.integers(0, layout.ndim - 1)))
    found = layout.gathered(dims)
    for rank, box in boxes(found).items():
        for dim, interval in enumerate(box):
            assert interval == (Interval(0, layout.shape[dim]) if dim in dims else boxes(layout)[rank][dim])
    assert found.axes == layout.axes
    if all(layout.cuts[d] is None for d in dims):
        assert found is layout


def test_gathering_looks_at_every_dim() -> None:
    cuts = Cuts.even(4, 2)
    layout = Layout(mesh_of(2, (2,)), (4, 4), ("data", "spatial0"), (None, cuts), ())
    assert layout.gathered([0]) is layout
    assert layout.gathered([0, 1]).cuts == (None, None)


@given(layouts(), st.data())
def test_one_dim_gets_other_cuts(layout: Layout, data: st.DataObject) -> None:
    dim, extent = data.draw(st.integers(0, layout.ndim - 1)), data.draw(st.integers(1, 9))
    axis = layout.axes[dim]
    cuts = None if axis is None else Cuts.even(extent, layout.mesh.size(axis))
    found = layout.with_cut(dim, cuts, extent)
    assert found.shape == tuple(extent if d == dim else n for d, n in enumerate(layout.shape))
    assert found.cuts == tuple(cuts if d == dim else c for d, c in enumerate(layout.cuts))
    assert (found.axes, found.images) == (layout.axes, layout.images)


@given(layouts(), st.data())
def test_picked_dims_take_axes_and_cuts_along(layout: Layout, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(layout.ndim)))
    at = data.draw(st.integers(0, layout.ndim))
    dims: list[int | None] = [*order[:at], None, *order[at:]]
    shape = [7 if d is None else layout.shape[d] for d in dims]
    found = layout.pick(dims, shape)
    whole = Interval(0, 7)
    for rank, box in boxes(layout).items():
        assert boxes(found)[rank] == tuple(whole if d is None else box[d] for d in dims)
    assert found.axes[at] is None


@given(layouts(), st.data())
def test_local_results_keep_cut_dims_and_resize_others(layout: Layout, data: st.DataObject) -> None:
    shape = [data.draw(st.integers(0, 5)) for _ in layout.shape]
    found = layout.uncut_resized(shape)
    for dim, local in enumerate(shape):
        if layout.is_cut(dim):
            assert (found.shape[dim], found.cuts[dim]) == (layout.shape[dim], layout.cuts[dim])
        else:
            assert found.shape[dim] == local
            cuts = found.cuts[dim]
            assert (cuts is None) == (layout.cuts[dim] is None)
            assert cuts is None or cuts.bounds == (0, local)


@given(layouts())
def test_a_layout_is_a_need(layout: Layout) -> None:
    """Its wants are each rank's own piece, so that nobody sends anything."""
    for dim, (axis, intervals) in enumerate(layout.wants()):
        for rank, box in boxes(layout).items():
            at = layout.mesh.coordinates_of(rank)[axis] if axis is not None else 0
            assert intervals[at] == (box[dim],)
    for rank in ranks_of(layout):
        found = route(seen_by(layout, rank), layout.wants())
        assert (found.sends, found.receives) == ((), ())


def carried_out(layout: Layout, other: Layout) -> dict[int, torch.Tensor]:
    """What each rank has after the exchange from a layout to another, simulated in this process."""
    whole = torch.arange(1, 1 + torch.Size(layout.shape).numel()).view(layout.shape)
    local = {rank: whole[slices(box)] for rank, box in boxes(layout).items()}
    routes = {rank: route(seen_by(layout, rank), other.wants()) for rank in ranks_of(layout)}
    found = {rank: torch.zeros(one.needed, dtype=whole.dtype) for rank, one in routes.items()}
    for rank, one in routes.items():
        for held, wanted in one.keeps:
            found[rank][wanted] = local[rank][held]
        for peer, parts in one.sends:
            places = dict(routes[peer].receives)[rank]
            for held, wanted in zip(parts, places, strict=True):
                found[peer][wanted] = local[rank][held]
    return found


@given(layouts(), st.data())
def test_an_exchange_brings_every_rank_its_piece_of_another_layout(layout: Layout, data: st.DataObject) -> None:
    """Also where an axis moves to another dim."""
    order = data.draw(st.permutations(range(layout.ndim)))
    axes = tuple(layout.axes[d] for d in order)
    cuts = []
    for extent, axis in zip(layout.shape, axes, strict=True):
        parts = layout.mesh.size(axis) if axis else 1
        inner = sorted(data.draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)))
        cuts.append(Cuts.of((0, *inner, extent)) if axis else None)
    cutting = {a for a, c in zip(layout.axes, layout.cuts, strict=True) if c is not None and c.parts > 1}
    needed = {a for a, c in zip(axes, cuts, strict=True) if c is not None and c.parts > 1}
    if not needed <= cutting:  # others have copies: each takes from itself and from those in its own group
        return
    other = replace(layout, axes=axes, cuts=tuple(cuts))
    whole = torch.arange(1, 1 + torch.Size(layout.shape).numel()).view(layout.shape)
    found = carried_out(layout, other)
    assert all(torch.equal(found[rank], whole[slices(box)]) for rank, box in boxes(other).items())


def test_ranks_share_images_along_the_other_axes_alone() -> None:
    mesh = mesh_of(2, (2, 3), rank=7)
    cuts = (Cuts.even(4, 2), None, Cuts.even(6, 2), Cuts.even(9, 3))
    have = Layout(mesh, (4, 3, 6, 9), AXES[:4], cuts, ())
    need = have.with_cut(2, Cuts.of((0, 2, 6)), 6).gathered([3])
    own, target = spatial_boxes(have, need, 2)
    assert list(own) == list(target) == [6, 7, 8, 9, 10, 11]
    for rank, (row, column) in zip(own, product(range(2), range(3)), strict=True):
        assert own[rank] == (Interval(3 * row, 3 * row + 3), Interval(3 * column, 3 * column + 3))
        assert target[rank] == (Interval(*((0, 2), (2, 6))[row]), Interval(0, 9))


def test_ranks_along_an_axis_that_cuts_nothing_do_not_share() -> None:
    mesh = mesh_of(1, (2, 2), rank=1)
    have = Layout(mesh, (1, 1, 4, 4), AXES[:4], (None, None, Cuts.even(4, 2), None), ())
    own, _ = spatial_boxes(have, have, 2)
    assert list(own) == [1, 3]


def test_an_axis_cuts_one_dim() -> None:
    cuts = Cuts.even(4, 2)
    with pytest.raises(LayoutError, match=r"cannot be cut along \('spatial0', 'spatial0'\)"):
        Layout(mesh_of(1, (2,)), (4, 4), ("spatial0", "spatial0"), (cuts, cuts), ())
    assert Layout(mesh_of(1, (2,)), (4, 4), ("spatial0", "spatial0"), (cuts, None), ()).cut_dims == (0,)
