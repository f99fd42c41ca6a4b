"""Cuts divide a dim without gaps, meet where extents are equal, and leave each datum with its owner."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mural.errors import LayoutError
from mural.geometry import Cuts, check_bounds

extents = st.integers(0, 40)


@st.composite
def any_cuts(draw: st.DrawFn) -> Cuts:
    """Cuts with empty parts too, flipped or not."""
    extent = draw(extents)
    inner = sorted(draw(st.lists(st.integers(0, extent), max_size=4)))
    cuts = Cuts.of((0, *inner, extent))
    return cuts.flipped() if draw(st.booleans()) else cuts


def owner_of_each(cuts: Cuts) -> list[int]:
    """The owner of every position, written out."""
    owners: list[int | None] = [None] * cuts.extent
    for coordinate, interval in enumerate(cuts.intervals()):
        for position in range(*interval):
            assert owners[position] is None, "two owners"
            owners[position] = coordinate
    assert None not in owners, "no owner"
    return [o for o in owners if o is not None]


def check_partition(cuts: Cuts, extent: int, parts: int) -> None:
    check_bounds(cuts.bounds, extent, parts)
    assert (cuts.extent, cuts.parts) == (extent, parts)
    assert sorted(cuts.owners) == list(range(parts))
    owner_of_each(cuts)


@given(extents, st.integers(1, 6))
def test_even_parts_differ_by_one_position(extent: int, parts: int) -> None:
    cuts = Cuts.even(extent, parts)
    check_partition(cuts, extent, parts)
    sizes = [interval.size for interval in cuts.intervals()]
    assert max(sizes) - min(sizes) <= 1


@given(extents, st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.integers(1, 8))
def test_weighted_bounds_are_the_nearest_multiples(extent: int, weights: list[int], align: int) -> None:
    cuts = Cuts.weighted(extent, weights, align)
    check_partition(cuts, extent, len(weights))
    for part, bound in enumerate(cuts.bounds[1:-1], 1):
        exact = Fraction(extent * sum(weights[:part]), sum(weights))
        assert bound == extent or bound % align == 0
        assert abs(bound - exact) <= Fraction(align, 2)


@pytest.mark.parametrize("weights", [(0, 0), (1, -1), (3, -1)])
def test_weights_must_make_sense(weights: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="weights"):
        Cuts.weighted(8, weights)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_sized_parts_have_these_sizes(sizes: list[int]) -> None:
    cuts = Cuts.sized(sizes)
    check_partition(cuts, sum(sizes), len(sizes))
    assert [interval.size for interval in cuts.intervals()] == sizes


@given(any_cuts(), extents)
@example(Cuts.of((0, 0, 0)), 1)
def test_scaled_keeps_proportions_and_owners(cuts: Cuts, extent: int) -> None:
    scaled = cuts.scaled(extent)
    check_partition(scaled, extent, cuts.parts)
    assert scaled.owners == cuts.owners
    for bound, before in zip(scaled.bounds, cuts.bounds, strict=True):
        assert abs(bound * cuts.extent - before * extent) * 2 <= cuts.extent


@given(any_cuts(), extents, extents)
def test_tensors_of_equal_extent_meet(cuts: Cuts, extent: int, other: int) -> None:
    """The result depends on the image's cuts and the extent alone, whatever was asked for between."""
    first = cuts.scaled(extent)
    cuts.scaled(other)
    assert Cuts(tuple(cuts.bounds), tuple(cuts.owners)).scaled(extent) == first
    assert cuts.scaled(cuts.extent) == cuts


@given(any_cuts())
def test_flipped_leaves_each_datum_with_its_owner(cuts: Cuts) -> None:
    flipped = cuts.flipped()
    check_partition(flipped, cuts.extent, cuts.parts)
    assert owner_of_each(flipped) == owner_of_each(cuts)[::-1]
    assert flipped.flipped() == cuts


@given(st.data(), any_cuts(), st.integers(1, 9))
def test_sliced_leaves_each_datum_with_its_owner(data: st.DataObject, cuts: Cuts, step: int) -> None:
    start, stop = (data.draw(st.integers(0, cuts.extent)) for _ in range(2))
    sliced = cuts.sliced(start, stop, step)
    expected = owner_of_each(cuts)[start:stop:step]
    check_partition(sliced, len(expected), cuts.parts)
    assert owner_of_each(sliced) == expected


@given(st.lists(st.integers(-2, 12), min_size=2, max_size=5), extents, st.integers(1, 5))
def test_check_bounds_accepts_partitions_alone(bounds: list[int], extent: int, parts: int) -> None:
    sizes = [b - a for a, b in pairwise(bounds)]
    if bounds[0] == 0 and bounds[-1] == extent and len(sizes) == parts and min(sizes) >= 0:
        check_bounds(bounds, extent, parts)
    else:
        with pytest.raises(LayoutError, match="do not divide"):
            check_bounds(bounds, extent, parts)


@pytest.mark.parametrize("bounds", [(0, 3, 2, 5), (0, 5, 2, 5), (0, -1, 2, 5), (1, 2, 3, 5), (0, 2, 3, 4)])
def test_each_bound_is_looked_at(bounds: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="do not divide"):
        check_bounds(bounds, 5, 3)
