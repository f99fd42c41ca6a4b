"""The link between two ranks of a mesh: the same answer everywhere, and of a sensible size."""

from __future__ import annotations

import pytest

import mural
from mural.cost import Link, measure_link
from mural.errors import PlanError
from ranks import run_on


def links() -> Link:
    mesh = mural.init(spatial=2)
    with pytest.raises(PlanError, match="are not a pair of a mesh of 2 ranks"):
        measure_link(mesh, 1, 1)
    return measure_link(mesh, 0, 1)


def test_both_ranks_know_the_link_between_them() -> None:
    first, second = run_on(2, links)
    assert first == second
    assert 0 < first.latency < 1
    assert 1e6 < first.bandwidth < 1e13
    assert first.seconds(2**24) > first.seconds(2**10)
