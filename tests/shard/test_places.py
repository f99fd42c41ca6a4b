"""What `shard` makes of its arguments, as data and without processes: axes, cuts in every form, boxes, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_layouts import boxes, mesh_of, seen_by

from mural.errors import LayoutError
from mural.geometry import Box, Cuts, Interval, slices
from mural.ranks import Mesh
from mural.shard import place
from mural.shard.place import asked_layout, axes_of, cuts_from_boxes, cuts_of, named, one_cut, place_on, shard

GRID = mesh_of(2, (2, 3))
IMAGE = torch.arange(4 * 3 * 8 * 9.0).view(4, 3, 8, 9)


def test_axes_are_those_of_images_unless_dims_are_named() -> None:
    assert axes_of(IMAGE, GRID, None) == {0: "data", 2: "spatial0", 3: "spatial1"}
    assert axes_of(IMAGE[:, 0], GRID, (1, 2)) == {0: "data", 1: "spatial0", 2: "spatial1"}
    assert axes_of(IMAGE, GRID, (-1, 1)) == {0: "data", 3: "spatial0", 1: "spatial1"}
    assert axes_of(IMAGE[:, 0, 0, 0], GRID, ()) == {0: "data"}
    assert axes_of(IMAGE, GRID, (3, 2, 1)) == {0: "data", 3: "spatial0", 2: "spatial1"}
    assert axes_of(IMAGE, mesh_of(1, (2,)), (0,)) == {0: "spatial0"}
    assert axes_of(IMAGE, mesh_of(3, ()), None) == {0: "data"}
    assert axes_of(torch.ones(2, 3), mesh_of(3, ()), None) == {0: "data"}
    assert axes_of(torch.ones(2, 3, 4), mesh_of(1, (2,)), (-3,)) == {0: "spatial0"}


@pytest.mark.parametrize(("dims", "message"), [
    ((0, 2), "which the data axis of 2 ranks needs"),
    ((2,), "must name one dim of 4 for each of the 2 spatial axes"),
    ((2, 2), "must name one dim"),
    ((2, -2), "must name one dim"),
    ((2, 4), "must name one dim"),
    ((2, -5), "must name one dim"),
])  # fmt: skip
def test_dims_that_cannot_be_cut_are_refused(dims: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        axes_of(IMAGE, GRID, dims)


def test_tensors_without_as_many_dims_are_refused() -> None:
    assert axes_of(torch.ones(1, 1, 2, 2), GRID, None)
    with pytest.raises(LayoutError, match="a tensor of 3 dims has no 2 spatial dims"):
        axes_of(IMAGE[0], GRID, None)


def test_what_is_no_tensor_or_no_mesh_is_refused() -> None:
    for tensor, mesh in ((IMAGE, "mesh"), ([1.0], GRID)):
        with pytest.raises(LayoutError, match="shard takes a tensor and the mesh"):
            axes_of(tensor, mesh, None)  # type: ignore[arg-type]
    sharded = shard(IMAGE, Mesh.of_one())
    with pytest.raises(LayoutError, match="sharded already"):
        axes_of(sharded, GRID, None)


@pytest.mark.parametrize(("given", "expected"), [
    (None, {}),
    ({2: (1, 7), -1: None}, {2: (1, 7), 3: None}),
    ({-4: (1, 3), 3: (9,)}, {0: (1, 3), 3: (9,)}),
    (((1, 7), (3, 3, 3)), {2: (1, 7), 3: (3, 3, 3)}),
    ((None, (3, 3, 3)), {3: (3, 3, 3)}),
    (((2, 6),), {2: (2, 6)}),
    ((8,), {2: (8,)}),
    ((1, 7), {2: (1, 7)}),
    ((0.5, 0.5), {2: (0.5, 0.5)}),
    (Cuts.of((0, 1, 8)), {2: Cuts.of((0, 1, 8))}),
    (np.array([1, 7]), {2: [1, 7]}),
    (torch.tensor([[0, 3, 8], [0, 4, 9]]), {2: [0, 3, 8], 3: [0, 4, 9]}),
    ((), {}),
])  # fmt: skip
def test_cuts_come_in_many_forms(given: Any, expected: dict[int, Any]) -> None:
    found = named(given, (2, 3), 4)
    assert list(found) == list(expected)
    for dim, spec in expected.items():
        assert (found[dim] if spec is None or isinstance(spec, Cuts) else type(spec)(found[dim])) == spec


@pytest.mark.parametrize(("given", "message"), [
    ({4: (1, 2)}, r"cuts were given for dims \[4\] of a tensor of 4 dims"),
    ({-5: (1, 2), 1: (2,)}, r"cuts were given for dims \[-5\]"),
    (((1, 7), (9,), (1,)), "3 cuts were given for the 2 dims"),
])  # fmt: skip
def test_cuts_of_no_dim_are_refused(given: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        named(given, (2, 3), 4)


@pytest.mark.parametrize(("spec", "bounds"), [
    ((3, 5, 2), (0, 3, 8, 10)),
    ((0, 3, 8, 10), (0, 3, 8, 10)),
    ((3, 8), (0, 3, 8, 10)),
    ((3.0, 5.0, 2.0), (0, 3, 8, 10)),
    (Cuts.of((0, 3, 8, 10)), (0, 3, 8, 10)),
    ((0, 10, 0), (0, 0, 10, 10)),
    ((np.int64(3), np.int64(5), np.int64(2)), (0, 3, 8, 10)),
    ((1, 2.0, 1), (0, 3, 8, 10)),
])  # fmt: skip
def test_a_cut_is_sizes_or_bounds_or_inner_bounds_or_weights(spec: Any, bounds: tuple[int, ...]) -> None:
    assert one_cut(spec, 10, 3, 1).bounds == bounds
    assert one_cut(spec, 10, 3, 1).owners == (0, 1, 2)


def test_weights_are_aligned() -> None:
    assert one_cut((1.0, 1.0), 10, 2, 4).bounds == (0, 4, 10)


@pytest.mark.parametrize(("spec", "message"), [
    ((3, 5, 1), "do not divide"),
    ((1, 3, 8, 10), "do not divide"),
    ((3, 8, 9, 10, 10), "do not divide"),
    ((3,), "do not divide"),
    ((8, 3), "do not divide"),
    ((1.0, 2.0), "2 weights"),
    ((1.0, 2.0, 3.0, 4.0), "4 weights"),
    ((1.0, float("nan"), 1.0), "finite"),
    ((1.0, float("inf"), 1.0), "finite"),
    ((-1.0, 1.0, 1.0), "weights"),
])  # fmt: skip
def test_cuts_that_do_not_divide_a_dim_are_refused(spec: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        one_cut(spec, 10, 3, 1)


def test_dims_without_a_cut_are_cut_evenly_and_images_are_not_aligned() -> None:
    axes = axes_of(IMAGE, GRID, None)
    found = cuts_of(IMAGE.shape, GRID, axes, {3: (1, 1, 7)}, 4)
    assert {dim: cuts.bounds for dim, cuts in found.items()} == {0: (0, 2, 4), 2: (0, 4, 8), 3: (0, 1, 2, 9)}
    assert cuts_of((5, 3, 9, 9), GRID, axes, {}, 2)[0].bounds == (0, 3, 5)
    assert cuts_of((5, 3, 10, 9), GRID, axes, {}, 4)[2].bounds == (0, 4, 10)
    assert cuts_of((5, 3, 9, 9), GRID, axes, {2: (1.0, 2.0)}, 3)[2].bounds == (0, 3, 9)
    with pytest.raises(LayoutError, match="align=0 must be at least 1"):
        cuts_of(IMAGE.shape, GRID, axes, {}, 0)
    with pytest.raises(LayoutError, match=r"cuts were given for dims \[1\], but the mesh cuts dims \[0, 2, 3\]"):
        cuts_of(IMAGE.shape, GRID, axes, {1: (3,)}, 1)


def test_the_layout_that_a_call_asks_for() -> None:
    found = asked_layout(IMAGE, GRID, axes_of(IMAGE, GRID, None), ((2, 6), None), 1)
    assert found.axes == ("data", None, "spatial0", "spatial1")
    assert [c and c.bounds for c in found.cuts] == [(0, 2, 4), None, (0, 2, 8), (0, 3, 6, 9)]
    assert found.images == (
        ("data", Cuts.even(4, 2)), ("spatial0", Cuts.of((0, 2, 8))), ("spatial1", Cuts.even(9, 3)),
    )  # fmt: skip
    only_batch = asked_layout(IMAGE, GRID, axes_of(IMAGE, GRID, None), {0: (1, 3)}, 1)
    assert only_batch.cuts[0] == Cuts.of((0, 1, 4))
    turned = asked_layout(IMAGE, GRID, axes_of(IMAGE, GRID, (3, 2)), ((1, 8), (2, 2, 4)), 1)
    assert [c and c.bounds for c in turned.cuts] == [(0, 2, 4), None, (0, 2, 4, 8), (0, 1, 9)]


# -- pieces that ranks bring -------------------------------------------------------------------------------------------


def brought(layout: Any) -> list[Box]:
    return list(boxes(layout).values())


def test_boxes_amount_to_cuts() -> None:
    axes = axes_of(IMAGE, GRID, None)
    layout = asked_layout(IMAGE, GRID, axes, ((2, 6), (0, 0, 9)), 1)
    cuts, shape = cuts_from_boxes(brought(layout), GRID, axes)
    assert shape == (4, 3, 8, 9)
    assert cuts == {d: c for d, c in enumerate(layout.cuts) if c is not None}


@pytest.mark.parametrize(("rank", "dim", "interval", "message"), [
    (7, 2, Interval(0, 3), "the boxes of the ranks do not tile"),
    (0, 1, Interval(1, 3), "rank 0 brought"),
    (4, 3, Interval(4, 6), "rank 4 brought"),
    (11, 3, Interval(6, 10), "do not tile"),
])  # fmt: skip
def test_boxes_that_leave_gaps_are_refused(rank: int, dim: int, interval: Interval, message: str) -> None:
    axes = axes_of(IMAGE, GRID, None)
    places = brought(asked_layout(IMAGE, GRID, axes, None, 1))
    places[rank] = (*places[rank][:dim], interval, *places[rank][dim + 1 :])
    with pytest.raises(LayoutError, match=message):
        cuts_from_boxes(places, GRID, axes)


def test_of_several_ranks_with_a_gap_the_first_is_named() -> None:
    axes = axes_of(IMAGE, GRID, None)
    places = brought(asked_layout(IMAGE, GRID, axes, None, 1))
    for rank in (2, 8):
        places[rank] = (places[rank][0], Interval(1, 3), *places[rank][2:])
    with pytest.raises(LayoutError, match="rank 2 brought"):
        cuts_from_boxes(places, GRID, axes)


def test_boxes_whose_rows_do_not_ascend_are_refused() -> None:
    axes = axes_of(IMAGE, GRID, None)
    places = brought(asked_layout(IMAGE, GRID, axes, None, 1))
    places = [(b[0], b[1], Interval(0, 9) if b[2].start == 0 else b[2], b[3]) for b in places]
    with pytest.raises(LayoutError, match="do not divide an extent of 9 into 2 parts"):
        cuts_from_boxes(places, GRID, axes)


def on_every_rank(mesh: Mesh, calls: list[dict[str, Any]], tensors: list[torch.Tensor], cuts: Any = None) -> list[Any]:
    """What `place_on` gives on each rank of a mesh; their agreement is simulated: first all say what they bring.

    `cuts` are those that they have to say.
    """
    told: list[Any] = []

    class Told(Exception):
        pass

    def tell(_: Mesh, brought: Any, place: Box = (), value: int = 0) -> Any:
        told.append((brought, place, value))
        raise Told

    def ranks() -> Any:
        return zip(range(mesh.world), tensors, calls, strict=True)

    with mock.patch.object(place, "agree", tell):
        for rank, tensor, call in ranks():
            with pytest.raises(Told):
                place_on(tensor, replace(mesh, rank=rank), **call)
    assert len({repr(brought) for brought, _, _ in told}) == 1
    assert cuts is None or told[0][0].cuts == cuts
    with mock.patch.object(place, "agree", return_value=[one[1] for one in told]):
        return [place_on(tensor, replace(mesh, rank=rank), **call) for rank, tensor, call in ranks()]


def test_a_whole_tensor_is_cut_into_copies_of_pieces() -> None:
    found = on_every_rank(GRID, [{"cuts": ((2, 6), None)}] * 12, [IMAGE] * 12)
    layout = asked_layout(IMAGE, GRID, axes_of(IMAGE, GRID, None), ((2, 6), None), 1)
    for rank, x in enumerate(found):
        assert x.placement == seen_by(layout, rank)
        assert torch.equal(x.local, IMAGE[slices(x.box)])
        assert x.local.untyped_storage().data_ptr() != IMAGE.untyped_storage().data_ptr()


def test_pieces_say_where_they_are() -> None:
    layout = asked_layout(IMAGE, GRID, axes_of(IMAGE, GRID, None), ((2, 6), None), 1)
    places = brought(layout)
    calls = [{"box": [tuple(i) for i in box]} for box in places]
    found = on_every_rank(GRID, calls, [IMAGE[slices(box)].clone().requires_grad_() for box in places])
    for rank, x in enumerate(found):
        assert x.placement == seen_by(layout, rank)
        assert torch.equal(x.local, IMAGE[slices(places[rank])])
        assert x.requires_grad


@pytest.mark.parametrize("counts", [(1, 3), (2, 0), (0, 4)])
def test_own_images_follow_each_other(counts: tuple[int, int]) -> None:
    of_place = [IMAGE[: counts[0]], IMAGE[counts[0] : sum(counts)]]
    tensors = [of_place[GRID.coordinates_of(rank)["data"]] for rank in range(12)]
    found = on_every_rank(
        GRID, [{"batch": "own", "cuts": {2: (2, 6)}}] * 12, tensors, (None, Cuts.of((0, 2, 8)), Cuts.even(9, 3))
    )
    for rank, x in enumerate(found):
        assert x.shape == (sum(counts), 3, 8, 9)
        assert x.placement.cuts[0] == Cuts.sized(counts)
        assert x.placement.cuts[2] == Cuts.of((0, 2, 8))
        assert x.placement.axes == ("data", None, "spatial0", "spatial1")
        assert dict(x.placement.images)["data"] == Cuts.sized(counts)
        assert torch.equal(x.local, IMAGE[: sum(counts)][slices(seen_by(x.placement, rank).box)])


@pytest.mark.parametrize(("more", "message"), [
    ({"batch": "mine"}, "choose one of"),
    ({"batch": "own", "box": [(0, 4), (0, 3), (0, 8), (0, 9)]}, "says that dim 0 has the images of this rank"),
    ({"batch": "own", "cuts": {0: (4,)}}, "says that dim 0"),
    ({"batch": "own", "dims": (0,)}, "says that dim 0"),
    ({"box": [(0, 4), (0, 3), (0, 8), (0, 8)]}, r"has extents \[4, 3, 8, 8\], the piece \(4, 3, 8, 9\)"),
])  # fmt: skip
def test_calls_that_contradict_themselves_are_refused_on_all_ranks(more: dict[str, Any], message: str) -> None:
    mesh = replace(Mesh.of_one(), spatial_dims=1)
    with mock.patch.object(place, "agree") as agree, pytest.raises(LayoutError, match=message):
        place_on(IMAGE, mesh, **more)
    agree.assert_called_once_with(mesh, None)


def test_own_images_may_be_cut_in_space() -> None:
    mesh = replace(Mesh.of_one(), spatial_dims=2)
    assert shard(IMAGE, mesh, batch="own", cuts={2: (8,)}).shape == IMAGE.shape
    assert torch.equal(shard(IMAGE, mesh, batch="own").local, IMAGE)


@pytest.mark.parametrize(("more", "compared"), [({}, True), ({"box": [(0, 4), (0, 3), (0, 8), (0, 9)]}, False)])
def test_values_are_compared_where_all_ranks_give_the_same(more: dict[str, Any], compared: bool) -> None:
    mesh, seen = Mesh.of_one(), []

    def agreed(_: Mesh, brought: Any, place: Box = (), value: int = 0) -> list[Box]:
        seen.append(value)
        return [place]

    with mock.patch.object(place, "agree", agreed), mock.patch.object(place, "due", return_value=True):
        shard(IMAGE, mesh, **more)
        with mock.patch.object(place, "checksum", return_value=5):
            shard(IMAGE, mesh, **more)
    assert seen[1] == (5 if compared else 0)
    assert bool(seen[0]) == compared


def test_leaves_that_learn_stay_leaves_where_a_piece_is_brought() -> None:
    piece = IMAGE.clone().requires_grad_()
    box = [(0, 4), (0, 3), (0, 8), (0, 9)]
    learns = shard(piece, Mesh.of_one(), box=box)
    assert learns.requires_grad
    assert not shard(IMAGE, Mesh.of_one(), box=box).requires_grad
    assert shard(piece * 2, Mesh.of_one(), box=box).requires_grad


def test_the_channel_axis_is_part_of_the_data_axis() -> None:
    mesh = replace(mesh_of(2, (1,)), sizes=(2, 1, 1, 3, 1, 1, 1))
    found = on_every_rank(mesh, [{}] * 6, [IMAGE.repeat(2, 1, 1, 1)] * 6)
    assert [x.placement.mesh for x in found] == [replace(mesh, rank=rank).folded for rank in range(6)]
    assert found[0].placement.cuts[0] == Cuts.even(8, 6)


def test_what_is_no_mesh_is_refused_by_shard() -> None:
    with pytest.raises(LayoutError, match=r"the mesh of mural\.init"):
        shard(IMAGE, "mesh")  # type: ignore[arg-type]
