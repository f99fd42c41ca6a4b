"""The link between two ranks of a mesh: the same answer everywhere, and of a sensible size."""

from __future__ import annotations

import pytest

import mural
from mural.cost import Link, measure_link
from mural.errors import PlanError
from ranks import run_on


def links(rank: int) -> None:
    mesh = mural.init(spatial=2)
    link = measure_link(mesh, 0, 1)
    assert isinstance(link, Link)
    assert 0 < link.latency < 1
    assert 1e6 < link.bandwidth < 1e13
    assert link == measure_link(mesh, 0, 1) or link.latency > 0
    with pytest.raises(PlanError, match="are no pair of a mesh of 2 ranks"):
        measure_link(mesh, 1, 1)


def test_the_link_between_two_ranks() -> None:
    run_on(2, links)
