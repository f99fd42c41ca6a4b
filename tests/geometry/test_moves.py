"""Moves bring everyone exactly what they need: carried out on plain dicts of positions."""

from itertools import product
from math import prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mural.errors import PlanError
from mural.geometry import Box, Cuts, Interval, Move, Needs, boxes, moves, needs_of, traffic, volume
from mural.ranks.mesh import choose_grid

Position = tuple[int, ...]


def members(box: Box) -> list[Position]:
    return list(product(*(range(*interval) for interval in box)))


@st.composite
def dim_cuts(draw: st.DrawFn) -> Cuts:
    extent = draw(st.integers(1, 9))
    cuts = Cuts.of((0, *sorted(draw(st.lists(st.integers(0, extent), max_size=2))), extent))
    return cuts.flipped() if draw(st.booleans()) else cuts


@st.composite
def some_intervals(draw: st.DrawFn, extent: int) -> tuple[Interval, ...]:
    """Disjoint ascending intervals in [0, extent), or one empty interval: what `Reads.reads` gives."""
    bounds = sorted(draw(st.sets(st.integers(0, extent), min_size=2, max_size=min(6, extent + 1))))
    pairs = [Interval(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    return draw(st.sampled_from([tuple(pairs), (Interval(0, 0),)]))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[Cuts, ...], dict[int, Box]]:
    """What every rank of a grid has."""
    cuts = tuple(draw(st.lists(dim_cuts(), min_size=1, max_size=2)))
    return cuts, dict(enumerate(product(*(c.intervals() for c in cuts))))


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[dict[int, Box], dict[int, Needs]]:
    """What every rank has and what it needs, windows with gaps included."""
    cuts, have = draw(layouts())
    return have, {rank: tuple(draw(some_intervals(c.extent)) for c in cuts) for rank in have}


def carried_out(have: dict[int, Box], found: tuple[Move, ...]) -> dict[int, dict[Position, int]]:
    """What everyone holds after the moves: the source of each position. Fails where something comes twice."""
    held: dict[int, dict[Position, int]] = {rank: {} for rank in have}
    for move in found:
        for at in members(move.box):
            assert at in members(have[move.source]), "the source does not have it"
            assert at not in held[move.destination], "a position came twice"
            held[move.destination][at] = move.source
    return held


@given(exchanges())
def test_everyone_gets_what_it_needs_once(case: tuple[dict[int, Box], dict[int, Needs]]) -> None:
    have, need = case
    found = moves(have, need)
    held = carried_out(have, found)
    for rank, needs in need.items():
        assert set(held[rank]) == {at for box in boxes(needs) for at in members(box)}
        own = set(members(have[rank]))
        assert all((source == rank) == (at in own) for at, source in held[rank].items()), "sent what was there"
    assert [(m.source, m.destination) for m in found] == sorted((m.source, m.destination) for m in found)
    assert all(volume(m.box) for m in found)


@given(exchanges())
def test_one_rank_finds_its_own_moves_alone(case: tuple[dict[int, Box], dict[int, Needs]]) -> None:
    have, need = case
    for rank in have:
        mine = tuple(m for m in moves(have, need) if rank in (m.source, m.destination))
        assert moves(have, need, rank) == mine


@given(exchanges())
def test_others_than_the_owners_may_need(case: tuple[dict[int, Box], dict[int, Needs]]) -> None:
    have, need = case
    elsewhere = {rank + len(have): needs for rank, needs in need.items()}
    found = moves(have, elsewhere)
    for rank, needs in elsewhere.items():
        held = [at for move in found if move.destination == rank for at in members(move.box)]
        assert sorted(held) == sorted(at for box in boxes(needs) for at in members(box))


@given(st.data(), layouts())
def test_another_layout_is_a_need(data: st.DataObject, case: tuple[tuple[Cuts, ...], dict[int, Box]]) -> None:
    """A re-layout leaves every position with exactly one rank."""
    cuts, have = case
    fresh = [
        sorted(data.draw(st.lists(st.integers(0, c.extent), min_size=n, max_size=n)))
        for c in cuts
        for n in [c.parts - 1]
    ]
    other = [Cuts.of((0, *inner, c.extent)) for c, inner in zip(cuts, fresh, strict=True)]
    targets = dict(enumerate(product(*(c.intervals() for c in other))))
    held = carried_out(have, moves(have, {rank: needs_of(box) for rank, box in targets.items()}))
    everything = [at for rank in have for at in held[rank]]
    assert len(everything) == len(set(everything)) == prod(c.extent for c in cuts)


@given(exchanges(), st.integers(1, 8))
def test_traffic_counts_what_travels(case: tuple[dict[int, Box], dict[int, Needs]], width: int) -> None:
    have, need = case
    found = moves(have, need)
    counted: dict[tuple[int, int], int] = {}
    for rank, held in carried_out(have, found).items():
        for source in held.values():
            if source != rank:
                counted[source, rank] = counted.get((source, rank), 0) + width
    assert traffic(found, width) == counted


# --- the grid with the least to move ----------------------------------------------------------------------------


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 16))
@example([2, 2], 8)
def test_choose_grid_cuts_least(image: list[int], ranks: int) -> None:
    """Against all grids: the fewest neighbours across the cuts, and of those the most cuts along the first dims."""
    grids = [g for g in product(range(1, ranks + 1), repeat=len(image)) if prod(g) == ranks]
    grids = [g for g in grids if all(n <= extent for n, extent in zip(g, image, strict=True))]

    def faces(grid: tuple[int, ...]) -> int:
        return sum((n - 1) * prod(image[:d] + image[d + 1 :]) for d, n in enumerate(grid))

    if not grids:
        with pytest.raises(PlanError, match="too few positions"):
            choose_grid(image, ranks)
        return
    least = min(map(faces, grids))
    assert choose_grid(image, ranks) == max(g for g in grids if faces(g) == least)
