"""Intervals and boxes behave as the sets of positions that they stand for."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from mural.geometry import Box, Interval, overlap, subtract, volume, whole

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
