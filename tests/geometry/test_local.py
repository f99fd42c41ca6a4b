"""Local coordinates: a global place is found in a piece of the tensor, and only where the piece holds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_moves import members, some_intervals

from mural.geometry import Box, Interval, overlap, slice_of, slices


@given(st.data(), st.integers(1, 12))
def test_an_interval_is_found_in_a_dim_without_its_gaps(data: st.DataObject, extent: int) -> None:
    intervals = data.draw(some_intervals(extent).filter(lambda pieces: pieces[0].size))
    piece = [i for interval in intervals for i in range(*interval)]
    outer = data.draw(st.sampled_from(intervals))
    start = data.draw(st.integers(outer.start, outer.stop - 1))
    part = Interval(start, data.draw(st.integers(start + 1, outer.stop)))
    assert piece[slice_of(part, intervals)] == list(range(*part))


@pytest.mark.parametrize("part", [Interval(1, 3), Interval(3, 5), Interval(1, 6), Interval(8, 10)])
def test_what_the_piece_does_not_hold_is_refused(part: Interval) -> None:
    with pytest.raises(ValueError, match="is not part of"):
        slice_of(part, (Interval(0, 2), Interval(5, 9)))
    with pytest.raises(ValueError, match="is not part of"):
        slices((Interval(2, 3), part), (Interval(0, 4), Interval(5, 9)))


intervals = st.tuples(st.integers(0, 4), st.integers(1, 5)).map(lambda p: Interval(p[0], p[0] + p[1]))
pairs_of_boxes = st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.tuples(*[intervals] * n)] * 2))


@given(pairs_of_boxes)
def test_a_box_is_found_in_a_piece_and_in_the_whole(case: tuple[Box, Box]) -> None:
    piece, other = case
    part = overlap(piece, other)
    assert members(tuple(Interval(*i) for i in part)) == [
        tuple(range(*held)[s][k] for held, s, k in zip(piece, slices(part, piece), at, strict=True))
        for at in members(tuple(Interval(0, i.size) for i in part))
    ]
    assert [(s.start, s.stop) for s in slices(part)] == list(part)
