"""Grids of tiles: every position is in one tile, a box touches the tiles that share a position with it, and splits."""

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_moves import members

from mural.geometry import Box, Interval, overlap, volume, whole
from mural.geometry.tile_grid import count, grid, split, tile_at, touched

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=3)
"""Extents and the tiles' extents."""


@st.composite
def boxes_in(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box]:
    """A shape, the extents of tiles, and a box without empty dims."""
    shape, chunks = (tuple(side) for side in zip(*draw(shapes), strict=True))
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    box = tuple(Interval(a, draw(st.integers(a + 1, n))) for a, n in zip(starts, shape, strict=True))
    return shape, chunks, box


@given(shapes)
def test_tiles_cover_an_image_once(pairs: list[tuple[int, int]]) -> None:
    shape, chunks = (tuple(side) for side in zip(*pairs, strict=True))
    tiles = [tile_at(index, chunks, shape) for index in product(*map(range, grid(shape, chunks)))]
    assert sorted(at for tile in tiles for at in members(tile)) == members(whole(shape))
    assert all(map(volume, tiles))


@given(boxes_in())
def test_a_box_touches_the_tiles_that_share_a_position_with_it(
    case: tuple[tuple[int, ...], tuple[int, ...], Box],
) -> None:
    shape, chunks, box = case
    every = list(product(*map(range, grid(shape, chunks))))
    meeting = [index for index in every if volume(overlap(tile_at(index, chunks), box))]
    assert list(touched(box, chunks)) == meeting
    assert count(box, chunks) == len(meeting)


def test_a_tile_reaches_beyond_the_image_unless_the_image_is_given() -> None:
    assert tile_at((1, 2), (4, 3)) == (Interval(4, 8), Interval(6, 9))
    assert tile_at((1, 2), (4, 3), (6, 7)) == (Interval(4, 6), Interval(6, 7))


@given(boxes_in(), st.integers(1, 6), st.integers(1, 60))
def test_a_split_covers_the_box_once_at_edges_of_tiles(
    case: tuple[tuple[int, ...], tuple[int, ...], Box], parts: int, most: int
) -> None:
    _, chunks, box = case
    found = split(box, chunks, parts, most)
    assert sorted(at for part in found for at in members(part)) == members(box)
    tiles = [set(touched(part, chunks)) for part in found]
    assert sum(map(len, tiles)) == len(set.union(*tiles)), "a tile is in two parts"
    rows = [-(-i.stop // c) - i.start // c for i, c in zip(box, chunks, strict=True)]
    assert len(found) >= min(parts, max(rows))
    assert all(volume(part) <= most or count(part, chunks) == 1 for part in found if prod(chunks) <= most)


@pytest.mark.parametrize(("box", "parts", "most", "expected"), [
    # as many parts as are asked for, of equally many tiles
    (((0, 12), (0, 4)), 3, 10**6, [(0, 4), (4, 8), (8, 12)]),
    (((0, 12), (0, 4)), 4, 10**6, [(0, 2), (2, 6), (6, 8), (8, 12)]),
    # no more parts than tiles
    (((1, 5), (0, 4)), 9, 10**6, [(1, 2), (2, 4), (4, 5)]),
    # as many as the positions ask for
    (((0, 8), (0, 4)), 1, 16, [(0, 4), (4, 8)]),
    (((0, 8), (0, 4)), 1, 32, [(0, 8)]),
    (((0, 8), (0, 4)), 1, 31, [(0, 4), (4, 8)]),
    # one part, and nothing
    (((3, 9), (0, 4)), 1, 10**6, [(3, 9)]),
    (((3, 3), (0, 4)), 2, 10**6, [(3, 3)]),
    (((3, 3), (0, 4)), 2, 1, [(3, 3)]),
    # parts with too many positions are cut again
    (((0, 10), (0, 4)), 2, 12, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]),
    (((0, 10), (0, 4)), 2, 16, [(0, 2), (2, 6), (6, 10)]),
    # beginning within a tile
    (((3, 11), (0, 4)), 2, 10**6, [(3, 6), (6, 11)]),
    (((5, 11), (0, 4)), 2, 10**6, [(5, 8), (8, 11)]),
])  # fmt: skip
def test_splits_along_the_dim_with_the_most_tiles(
    box: tuple[tuple[int, int], ...], parts: int, most: int, expected: list[tuple[int, int]]
) -> None:
    found = split(tuple(Interval(*pair) for pair in box), (2, 4), parts, most)
    assert [tuple(part[0]) for part in found] == expected
    assert all(tuple(part[1]) == box[1] for part in found)


def test_of_several_dims_with_as_many_tiles_the_outermost_is_cut() -> None:
    found = split((Interval(0, 4), Interval(0, 4)), (2, 2), 2, 100)
    assert found == ((Interval(0, 2), Interval(0, 4)), (Interval(2, 4), Interval(0, 4)))
    assert split((Interval(0, 2), Interval(0, 6)), (2, 2), 2, 100)[0] == (Interval(0, 2), Interval(0, 2))
