"""Separation networks over ranks by domain and by part, with other axes: the results of one process."""

from __future__ import annotations

import pytest
from domain_cases import Case, holds

import mural
from mural import Plan
from ranks import run_on

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


def taken() -> list[bool]:
    """Which domains' images this rank reads, and whether it reads labels."""
    case = Case(Plan(domain=2))
    network = case.network()
    pm = mural.parallelize(network, case.plan, network.loss())
    return [*(pm.needs(True, number).image for number in range(2)), pm.needs(True).target]


def test_a_rank_reads_the_images_of_its_own_domain() -> None:
    assert run_on(2, taken) == [[True, False, True], [False, True, False]]
