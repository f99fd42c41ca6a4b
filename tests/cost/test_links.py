"""The link between two ranks of a mesh: the same answer everywhere, and of a sensible size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mural
from mural.cost import Link, measure_link
from mural.cost.hardware import SIZES, fit_link
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


@given(noise=st.lists(st.floats(1, 100), min_size=len(SIZES), max_size=len(SIZES)))
def test_a_busy_machine_has_a_link_of_a_sensible_size(noise: list[float]) -> None:
    """Small messages that were held up made the line fall, and the bandwidth 1e15."""
    true = Link(1e-4, 1e9)
    seconds = [true.seconds(size) * factor for size, factor in zip(SIZES, noise, strict=True)]
    found = fit_link(SIZES, seconds)
    assert min(seconds) / 100 <= found.latency <= min(seconds)
    assert 1e6 < found.bandwidth < 1e12
