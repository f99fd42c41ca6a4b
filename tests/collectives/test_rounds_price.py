"""Prices: the formulas, the bounds and contention, working memory; drawings; and the measured gauge."""

from __future__ import annotations

from dataclasses import astuple
from math import ceil, log2

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import mural
from mural.collectives.algorithms import (
    ALGORITHMS,
    all_reduction,
    broadcast,
    butterfly,
    halving_doubling,
    parameter_server,
    ring,
    ring_blocking,
    tree,
    two_level,
)
from mural.collectives.choose import BACKEND, rounds_of
from mural.collectives.execute import job_of
from mural.collectives.link_costs import Gauge, asked, fitted, gauge, samples
from mural.collectives.price import (
    Wire,
    butterfly_formula,
    cost,
    least_latency,
    least_transfer,
    loads,
    tree_formula,
    working_memory,
)
from mural.collectives.rounds import Collective
from mural.collectives.team import team_of
from mural.errors import PlanError, UnsupportedOp
from ranks import run_on

L, G = 3e-5, 7e-10
WIRE = Wire(L, G)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@given(size=st.integers(1, 10**9))
def test_formulas(ranks: int, size: int) -> None:
    assert cost(tree(ranks), size, WIRE) == pytest.approx(tree_formula(ranks, size, L, G))
    assert cost(butterfly(ranks), size, WIRE) == pytest.approx(butterfly_formula(ranks, size, L, G))
    share = 2 * (ranks - 1) / ranks * size * G
    assert cost(halving_doubling(ranks), size, WIRE) == pytest.approx(2 * log2(ranks) * L + share)
    assert cost(ring(ranks), size, WIRE) == pytest.approx(2 * (ranks - 1) * L + share)
    assert cost(ring_blocking(ranks), size, WIRE) == pytest.approx(4 * (ranks - 1) * L + 2 * share)
    assert cost(parameter_server(ranks), size, WIRE) == pytest.approx(2 * L + 2 * (ranks - 1) * size * G)


@given(st.integers(2, 9), st.sampled_from(list(ALGORITHMS)), st.integers(1, 10**8))
def test_bounds(ranks: int, name: str, size: int) -> None:
    """No algorithm is below them; but the parameter server has but two rounds, since a port takes many messages."""
    seconds = cost(all_reduction(name, [list(range(ranks))]), size, WIRE)
    assert seconds >= least_transfer(size, G)
    assert name == "parameter-server" or seconds >= least_latency(ranks, L)
    assert least_latency(ranks, L) == ceil(log2(ranks)) * L


def test_a_ring_overtakes_a_tree_as_messages_grow() -> None:
    for ranks in (4, 8):
        small, large = 100, 10**8
        assert cost(tree(ranks), small, WIRE) < cost(ring(ranks), small, WIRE)
        assert cost(ring(ranks), large, WIRE) < cost(tree(ranks), large, WIRE)


def test_a_broadcast_in_chunks_beats_one_in_a_piece() -> None:
    whole, parts = (cost(broadcast(8, chunks=k, shape="chain"), 10**8, WIRE) for k in (1, 64))
    assert parts < whole / 6


def test_messages_that_share_a_link_wait_for_each_other() -> None:
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    slow = Wire(L, G, outside_per_byte=10 * G)
    last = loads(butterfly(8), 1000.0, nodes)[-1]
    assert (last.port, last.outside, last.total) == (1000, 4000, 8000)
    assert [load.outside for load in loads(two_level(nodes), 1000.0, nodes)] == [0, 0, 500, 500, 0, 0]
    assert cost(two_level(nodes), 10**7, slow, nodes) < cost(butterfly(8), 10**7, slow, nodes) / 2
    shared = Wire(L, G, medium_per_byte=G)
    assert cost(butterfly(8), 10**7, shared) == pytest.approx(3 * (L + 8e7 * G))
    added = Wire(0.0, 0.0, added_per_byte=1.0)
    assert cost(ring(4), 4.0, added) == 3 == cost(halving_doubling(4), 4.0, added)
    assert cost(parameter_server(4), 4.0, added) == 12


def test_an_exchange_takes_longer_than_a_message() -> None:
    """On two ranks both counted as one message, so rings were predicted a third too fast."""
    assert [load.handled for load in loads(tree(2), 8.0)] == [1, 1]
    assert [load.handled for load in loads(ring(2), 8.0)] == [2, 2]
    assert [load.handled for load in loads(parameter_server(4), 8.0)] == [3, 3]
    each = Gauge(latency=1.0, message=0.5)
    assert (cost(tree(2), 8, each), cost(butterfly(2), 8, each), cost(ring(2), 8, each)) == (2, 1.5, 3)
    assert cost(Collective("silent", 2, 1, ((),)), 8, each) == 1, "a round without messages has none too few"


@pytest.mark.parametrize(("name", "by_itself"), [
    ("tree", 1.0),
    ("butterfly", 1.0),
    ("halving-doubling", 0.5),
    ("ring", 0.25),
    ("ring-blocking", 0.25),
    ("two-level", 1.0),
    ("parameter-server", 3.0),
])  # fmt: skip
def test_working_memory(name: str, by_itself: float) -> None:
    """A ring needs a P-th of the buffer; whoever takes whole buffers, as many as arrive at once."""
    found = all_reduction(name, [[0, 1], [2, 3]])
    assert max(working_memory(found, 1000, 4, segmented=False)) == 4000 * by_itself
    large = 2**24
    assert max(working_memory(found, large, 4)) <= 3 * 3 * 2**21, "segments bound it, whatever the size"


def memory_of_jobs(values: int) -> list[bool]:
    """Whether what is allocated for each algorithm is what its rounds say."""
    team = team_of(None)
    flat = torch.ones(values)
    found: list[bool] = []
    for name in ALGORITHMS:
        for deterministic in (False, True):
            collective = rounds_of(name, team.nodes, deterministic)
            said = working_memory(collective, values, 4)[team.rank]
            found.append(job_of(collective, flat, team).bytes == said)
    return found


@pytest.mark.slow
def test_working_memory_is_what_a_run_allocates() -> None:
    assert all(all(found) for found in run_on(3, memory_of_jobs, 1001))


# What was measured ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_gauge_of_a_plain_link_gives_the_price_of_the_wire(name: str) -> None:
    collective = all_reduction(name, [[0, 1, 2, 3]])
    plain = Gauge(latency=L, per_byte=G)
    for size in (1e5, 1e7):
        assert cost(collective, size, plain) == pytest.approx(cost(collective, size, WIRE))
    assert (plain.wire.latency, plain.wire.per_byte) == (L, G)


@pytest.mark.parametrize("ranks", [3, 4, 8])
@settings(max_examples=20, deadline=None)
@given(
    st.tuples(*[st.floats(1e-6, 1e-4)] * 3, *[st.floats(1e-11, 1e-9)] * 4),
    st.lists(st.integers(0, 6), max_size=3),
)
def test_what_rounds_take_can_be_told_from_the_samples(
    ranks: int, constants: tuple[float, ...], off: list[int]
) -> None:
    """The samples tell the constants apart, also where some are zero: others' prices come out as they are."""
    true = Gauge(*(0.0 if place in off else c for place, c in enumerate(constants)))
    cases = [(each, size * each.chunks) for each in samples(ranks) for size in (2**10, 2**14, 2**17, 2**20, 2**23)]
    rows = [[1.0, *map(sum, zip(*map(asked, loads(each, size)), strict=True))] for each, size in cases]
    taken = np.array([cost(each, size, true) for each, size in cases])
    if not taken.all():
        return
    found = Gauge(*fitted(np.array(rows), taken).tolist())
    for name in ALGORITHMS:
        for size in (2**12, 2**21, 2**26):
            rounds = all_reduction(name, [list(range(ranks))])
            assert cost(rounds, size, found) == pytest.approx(cost(rounds, size, true), rel=1e-3)


def chosen() -> tuple[Gauge, str, str, float]:
    """What is measured and chosen, and a sum by what was chosen."""
    team = team_of(None)
    tensor = torch.ones(1000)
    plain, in_order = (mural.comm.explain(tensor, deterministic=one_order) for one_order in (False, True))
    total = mural.comm.all_reduce(tensor, "auto")
    again = mural.comm.all_reduce(torch.ones(1000), "auto", deterministic=True)
    assert torch.equal(total, again)
    if team.backend.eager:
        assert set(plain.measured) - set(ALGORITHMS) == {BACKEND}
        assert set(in_order.measured) < set(ALGORITHMS)
    short = torch.ones(1000, dtype=torch.int16)  # gloo does not add these
    with pytest.raises(UnsupportedOp, match=r"does not add torch.int16: choose 'auto' or"):
        mural.comm.all_reduce(short, BACKEND)
    assert BACKEND not in mural.comm.explain(short).measured
    assert mural.comm.all_reduce(short, "auto")[0] == team.size
    return gauge(team, (2**10, 2**16), 1), str(plain), str(in_order), total[0].item()


@pytest.mark.slow
def test_auto_measures_chooses_and_says_so() -> None:
    found = run_on(2, chosen)
    assert found[0] == found[1], "all ranks choose alike"
    measured, plain, in_order, total = found[0]
    assert total == 2.0
    assert plain.startswith("auto takes ")
    assert "fastest of 4 that were tried with 4,096 bytes on 2 ranks over" in plain or "rounds of its own" in plain
    assert "fastest of 3" in in_order or "one order" in in_order
    assert min(astuple(measured)) >= 0
    assert cost(ring(2), 2**12, measured) > 0


def test_a_process_alone() -> None:
    if dist.is_initialized():
        pytest.skip("this process has a group")
    assert mural.comm.all_reduce(torch.ones(3), "auto").tolist() == [1.0] * 3
    assert mural.comm.all_reduce(torch.ones(3), "backend").tolist() == [1.0] * 3
    assert str(mural.comm.explain(torch.ones(3))) == "auto takes ring: one rank has nothing to send"
    with pytest.raises(PlanError, match="drop deterministic=True"):
        mural.comm.all_reduce(torch.ones(3), "backend", deterministic=True)
    with pytest.raises(PlanError, match="a gauge needs two ranks"):
        gauge(team_of(None))
