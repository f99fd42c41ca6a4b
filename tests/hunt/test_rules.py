"""A fixed selection of the rule validator's cases: nothing is incorrect, and nothing crashes."""

from __future__ import annotations

import pytest

from hunt.rules import GRIDS, fixed, outcomes_of, search
from hunt.rules_case import Place

PLACES = (Place("ranks", 0, (2,)), Place("ranks", 0, (), 2), Place("microbatches", 0), Place("tiles", 0))


def broken(seed: int, place: Place, count: int) -> list[str]:
    """Cases that are neither exact nor refused by name."""
    jobs = fixed(seed, place, count)
    found = zip(jobs, outcomes_of(jobs), strict=True)
    return [f"{o.kind}: {j.case.line}: {o.detail}" for j, o in found if o.kind in ("incorrect", "crashed", "hung")]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_operations_are_exact_or_refused(place: Place) -> None:
    assert broken(40, place, {"ranks": 20, "tiles": 6}.get(place.kind, 14)) == []


@pytest.mark.slow
@pytest.mark.parametrize("grid", sorted(set(GRIDS)), ids=str)
def test_operations_on_grids(grid: tuple[tuple[int, ...], int]) -> None:
    assert broken(41, Place("ranks", 0, *grid), 250) == []


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES[2:], ids=lambda place: place.name)
def test_operations_in_time(place: Place) -> None:
    assert broken(42, place, 250) == []


@pytest.mark.slow
def test_a_search_is_the_same_for_the_same_seed() -> None:
    lines = [[job.case.line for job in fixed(7, PLACES[0], 12)] for _ in range(2)]
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_a_search_counts_and_reports() -> None:
    said: list[str] = []
    tally = search(3, 20.0, said.append, only=("abs", "sum"))
    assert (tally.search, tally.findings) == ("rules", ())
    assert tally.exact > 0
    assert any("exact" in line for line in said)
