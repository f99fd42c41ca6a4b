"""Separation networks over ranks by domain and by part, with other axes: the results of one process."""

from __future__ import annotations

import pytest
from domain_cases import Case, holds

from mural import Plan

QUICK = [
    Case(Plan(domain=2)),
    Case(Plan(domain=2), similarity="mmd", reconstruction="mse", head="pixel", unequal=True, size=(8, 12)),
    Case(by_part=True, steps=1),
]
SLOW = [
    *(Case(Plan(domain=1 + targets), 1 + targets) for targets in range(2, 8)),
    *(Case(Plan(domain=3), 5, similarity=similarity) for similarity in ("mmd", "adversary")),
    Case(Plan(), 3),
    Case(by_part=True, similarity="mmd", head="pixel", unequal=True),
    Case(domains=5, by_part=True, steps=1),
    Case(domains=8, by_part=True, steps=1),
    Case(Plan(recompute=("reconstruction",)), by_part=True),
    *(Case(Plan(domain=2, data=2), images=(3, 2), similarity=similarity) for similarity in ("mmd", "adversary")),
    Case(Plan(domain=2, spatial=(2, 1)), head="pixel"),
    Case(Plan(domain=2, spatial=(1, 2)), head="pixel", similarity="mmd"),
    Case(Plan(spatial=(2, 1)), by_part=True, head="pixel", steps=1),
    Case(Plan(domain=2, stage=2, cuts=("shared",))),
    Case(Plan(domain=2, stage=3, cuts="layers"), similarity="mmd"),
    Case(Plan(domain=2, stage=2, cuts="time"), 3, similarity="mmd"),
    Case(Plan(domain=2, stage=2, spatial=(2, 1, 1)), head="pixel", size=(8, 8, 8), steps=1),
    Case(Plan(domain=2, stage=2, spatial=(2, 1, 1), data=2), head="pixel", size=(8, 8, 8), steps=1),
]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_domains_over_ranks_equal_one_process(case: Case) -> None:
    holds(case)
