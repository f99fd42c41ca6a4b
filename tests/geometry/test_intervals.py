"""Intervals and boxes behave as the sets of positions that they stand for."""

from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mural.geometry import Box, Interval, broadcast, disjoint, overlap, subtract, volume, whole

positions = st.integers(-6, 12)
anything = st.builds(Interval, positions, positions)
"""Empty intervals too, and those whose stop lies before their start."""


@st.composite
def inside(draw: st.DrawFn, outer: Interval) -> Interval:
    start = draw(st.integers(outer.start, outer.stop))
    return Interval(start, draw(st.integers(start, outer.stop)))


@st.composite
def nested_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    ordered = st.tuples(positions, st.integers(0, 6)).map(lambda t: Interval(t[0], t[0] + t[1]))
    outer = tuple(draw(st.lists(ordered, min_size=1, max_size=3)))
    return outer, tuple(draw(inside(interval)) for interval in outer)


def members(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(*interval) for interval in box)))


@given(anything)
def test_size_counts_the_positions(a: Interval) -> None:
    assert a.size == len(range(*a))


@given(anything, anything)
def test_and_is_the_common_positions(a: Interval, b: Interval) -> None:
    common = a & b
    assert set(range(*common)) == set(range(*a)) & set(range(*b))
    assert common.start <= common.stop


@given(anything, anything)
def test_contains_is_the_subset(a: Interval, b: Interval) -> None:
    assert a.contains(b) == (set(range(*b)) <= set(range(*a)))


@given(anything, positions)
def test_shift_moves_every_position(a: Interval, by: int) -> None:
    assert list(range(*a.shift(by))) == [i + by for i in range(*a)]


@given(st.lists(st.tuples(anything, anything), min_size=1, max_size=3))
def test_boxes_are_products(pairs: list[tuple[Interval, Interval]]) -> None:
    a, b = (tuple(side) for side in zip(*pairs, strict=True))
    assert volume(a) == len(members(a))
    assert set(members(overlap(a, b))) == set(members(a)) & set(members(b))


@given(nested_boxes())
def test_subtract_covers_the_rest_once(boxes: tuple[Box, Box]) -> None:
    outer, inner = boxes
    slabs = subtract(outer, inner)
    covered = [at for slab in slabs for at in members(slab)]
    assert len(covered) == len(set(covered)), "slabs overlap"
    assert set(covered) == set(members(outer)) - set(members(inner))
    assert all(volume(slab) for slab in slabs)


def test_subtract_of_everything_and_of_nothing() -> None:
    box = (Interval(0, 3), Interval(2, 5))
    assert subtract(box, box) == ()
    assert sum(volume(slab) for slab in subtract(box, (Interval(1, 1), Interval(3, 3)))) == volume(box)


@given(st.lists(st.integers(0, 5), max_size=3))
def test_whole_is_every_index(shape: list[int]) -> None:
    assert members(whole(shape)) == list(product(*map(range, shape)))


@given(st.lists(st.tuples(anything, anything), max_size=4))
def test_disjoint_boxes_have_no_position_in_common(boxes: list[Box]) -> None:
    shared = [set(members(a)) & set(members(b)) for a, b in combinations(boxes, 2)]
    assert disjoint(boxes) == (not any(shared))


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3))
def test_broadcast_is_torchs(shapes: list[list[int]]) -> None:
    try:
        expected = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        with pytest.raises(ValueError, match="do not broadcast"):
            broadcast(*shapes)
        return
    assert broadcast(*shapes) == expected


def test_an_interval_without_positions_is_within_every_other() -> None:
    assert Interval(2, 4).contains(Interval(9, 9))
    assert not Interval(2, 2).contains(Interval(2, 3))


def test_shapes_that_do_not_broadcast() -> None:
    assert broadcast() == ()
    assert broadcast((), (2,)) == (2,)
    assert broadcast((3, 1), (1, 4), (4,)) == (3, 4)
    for shapes in (((2,), (3,)), ((2, 1), (3, 4)), ((3, 1), (3, 2), (3,)), ((0,), (2,))):
        with pytest.raises(ValueError, match="do not broadcast"):
            broadcast(*shapes)
