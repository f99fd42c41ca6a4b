"""What leaves and when, from traces alone: no process, no tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural.memory.offload.step_trace import Kind, StepTrace, TracedMemory
from mural.memory.offload.swap_plan import EASY, Absence, SwapChoice, SwapPlan, is_worth

LINK = 1e3


def chain(sizes: list[int], seconds: float = 1.0) -> StepTrace:
    """A model of layers whose results are saved one after the other, and taken in reverse."""
    n = len(sizes)
    memory = [
        TracedMemory(size, "activations", (k, 2 * n - 1 - k), frozenset({2 * n - 1 - k}))
        for k, size in enumerate(sizes)
    ]
    alive = [sum(s for k, s in enumerate(sizes) if k <= m <= 2 * n - 1 - k) for m in range(2 * n)]
    return StepTrace((seconds,) * (2 * n), tuple(alive), tuple(memory))


@st.composite
def traces(draw: st.DrawFn) -> StepTrace:
    """Blocks of all kinds with uses and gates anywhere."""
    length = draw(st.integers(2, 14))
    memory: list[TracedMemory] = []
    for _ in range(draw(st.integers(1, 8))):
        lasting = draw(st.booleans())
        inside = draw(st.lists(st.integers(0, length - 1), min_size=0 if lasting else 1, max_size=4, unique=True))
        uses = sorted(inside)
        gates = set(draw(st.lists(st.sampled_from(uses), max_size=4))) if uses else set[int]()
        kinds: list[Kind] = ["parameters", "optimizer"] if lasting else ["activations", "fixed"]
        if lasting:
            uses, gates = [-1, *uses, length], {*gates, length}
        memory.append(
            TracedMemory(draw(st.integers(1, 900)), draw(st.sampled_from(kinds)), tuple(uses), frozenset(gates))
        )
    alive = [
        sum(m.size for m in memory if m.uses[0] <= k <= m.uses[-1]) + draw(st.integers(0, 50)) for k in range(length)
    ]
    return StepTrace(tuple(draw(st.floats(0.0, 2.0)) for _ in range(length)), tuple(alive), tuple(memory))


def check(trace: StepTrace, plan: SwapPlan) -> None:
    """Every absence lies between two uses and ends at a gate; and the peak is what is left."""
    away = [0] * trace.length
    for a in plan.absences:
        one = trace.memory[a.memory]
        assert -1 <= a.left < a.freed < a.fetched <= a.needed <= trace.length
        assert not any(a.left < use < a.needed for use in one.uses)
        assert a.left in one.uses
        assert a.needed in one.gates
        for k in range(a.freed, a.fetched):
            away[k] += a.size
    assert plan.peak == max(whole - gone for whole, gone in zip(trace.bytes, away, strict=True))


@given(
    trace=traces(),
    limit=st.integers(0, 4000),
    kinds=st.sets(st.sampled_from(["activations", "parameters", "optimizer"])),
)
def test_plans_are_possible_and_keep_their_word(trace: StepTrace, limit: int, kinds: set[str]) -> None:
    choice = SwapChoice(trace, kinds, LINK)
    free, within, everything = choice.free(), choice.within(limit), choice.everything()
    eased = choice.eased(limit)
    for plan in (free, within, everything, eased):
        check(trace, plan)
        assert all(trace.memory[a.memory].kind in kinds for a in plan.absences)
    assert free.seconds == pytest.approx(sum(trace.seconds)), "nobody waits"
    assert everything.peak <= free.peak <= max(trace.bytes)
    assert within.peak <= max(limit, everything.peak), "it fits, if anything does"
    assert eased.peak <= within.peak
    assert eased.seconds <= (1 + EASY) * within.seconds
    if max(trace.bytes) <= limit:
        assert not within.absences, "what fits stays"
        assert not eased.absences


def test_what_is_needed_last_leaves_first() -> None:
    plan = SwapChoice(chain([100] * 6), {"activations"}, LINK).within(400)
    assert plan.peak == 400
    assert {a.memory for a in plan.absences} <= {0, 1, 2, 3}
    assert plan.seconds == pytest.approx(12.0)


def test_room_is_left_below_a_limit_where_it_costs_little() -> None:
    """A Swin transformer planned for all of its memory ran out of it: torch's allocator had nothing left over."""
    quick = SwapChoice(chain([100] * 20), {"activations"}, LINK)
    assert quick.within(1600).peak == 1600
    assert quick.eased(1600).peak == 1400, "the first share that is tried"
    slow = SwapChoice(chain([100] * 6), {"activations"}, 20.0)
    assert slow.eased(300) == slow.within(300), "it would wait for the link"


def test_a_slow_link_makes_the_device_wait() -> None:
    slow = SwapChoice(chain([100] * 6), {"activations"}, 20.0)
    assert slow.within(300).seconds > 12.0
    assert slow.free().seconds == pytest.approx(12.0)
    assert slow.free().peak > slow.within(300).peak == 300


def test_what_left_before_is_not_copied_again() -> None:
    weight = TracedMemory(100, "parameters", (-1, 2, 6, 9), frozenset({2, 6, 9}))
    trace = StepTrace((1.0,) * 9, (100,) * 9, (weight,))
    plan = SwapChoice(trace, {"parameters"}, LINK).everything()
    assert [(a.left, a.needed, a.copied) for a in plan.absences] == [(-1, 2, True), (2, 6, False), (6, 9, False)]
    assert plan.moved == (100, 300)


@pytest.mark.parametrize(
    ("peak", "seconds", "host", "worth"),
    [
        (99, 1.0, 0.0, False),  # a hundredth of the memory is nothing
        (97, 1.0, 0.0, True),
        (97, 1.0, 1.0, True),  # a long step does not notice the host
        (97, 0.02, 0.005, True),  # nor does one that computes meanwhile
        (97, 0.02, 0.018, False),  # 60 moments take a sixth of a short step that waits for the host
        (80, 0.02, 0.018, True),  # for a fifth of the memory that is worth it
    ],
)
def test_memory_leaves_unasked_if_it_frees_more_than_it_costs(
    peak: int, seconds: float, host: float, worth: bool
) -> None:
    trace = StepTrace((seconds / 60,) * 60, (100,) * 60, ())
    assert is_worth(SwapPlan((), peak, seconds), trace, host) is worth


def test_the_host_has_room_for_so_much() -> None:
    trace = chain([100] * 6)
    assert SwapChoice(trace, {"activations"}, LINK, host=250).free().host <= 250
    for host in (0, 250, 400):
        forced = SwapChoice(trace, {"activations"}, LINK, host=host).within(0)
        assert forced.host <= host, "nor does a limit of the device fill the host"
    assert SwapChoice(trace, {"activations"}, LINK, least=101).free().absences == ()


def test_a_use_without_a_gate_keeps_memory() -> None:
    assert TracedMemory(8, "parameters", (0, 3, 7), frozenset({7})).gaps() == [(3, 7)]
    assert Absence(0, 0, 1, 2, 3, 8).copied
