"""Timelines: the drawn tables, the laws of time and memory, and a case priced by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import programs

from mural.errors import PlanError
from mural.pipeline.gems import gems
from mural.pipeline.schedule import Action, Schedule, forward_only, gpipe, interleaved, one_f_one_b, sequential
from mural.pipeline.timeline import StageCosts, Timeline, simulate
from mural.pipeline.transfers import Edge, Program, needed_by, with_messages
from mural.report.gantt import text


def chained(schedule: Schedule, size: int = 0) -> Program:
    return with_messages(schedule, [Edge((s, 0), s, (s + 1,), bytes=size) for s in range(schedule.stages - 1)])


def played(schedule: Schedule, **costs: object) -> Timeline:
    """Forward 1 and backward 2 on every stage."""
    stages = schedule.stages
    return simulate(chained(schedule), StageCosts((1.0,) * stages, (2.0,) * stages, **costs))  # pyright: ignore[reportArgumentType]


def drawn(table: str) -> str:
    return "\n".join(line.strip() for line in table.strip().splitlines())


TABLES = [
    (
        sequential(4, 2),
        """
        0.........aa1.........bb
        .0......aa...1......bb..
        ..0...aa......1...bb....
        ...0aa.........1bb......
        """,
    ),
    (
        gpipe(3, 4),
        """
        0123......aabbccdd
        .0123...aabbccdd..
        ..0123aabbccdd....
        """,
    ),
    (
        one_f_one_b(3, 4),
        """
        012....aa3bb.cc.dd
        .01..aa2bb3cc.dd..
        ..0aa1bb2cc3dd....
        """,
    ),
    (
        interleaved(2, 2, 4),
        """
        01012.aa3bb2aa3bb.cc.ddccdd
        .010aa1bb2aa3bb2cc3ddccdd..
        """,
    ),
    (
        interleaved(2, 2, 3),
        """
        012012.aa.bb.ccaabbcc
        .0120aa1bb2ccaabbcc..
        """,
    ),
    (
        gems(4, 2, order="lean"),
        """
        0.........aa1bb......
        .0......aa1....bb....
        ..0...aa1........bb..
        ...0aa1............bb
        """,
    ),
    (
        gems(4, 2),
        """
        0..1bb....aa
        .01...bbaa..
        .10...aabb..
        1..0aa....bb
        """,
    ),
    (
        gems(4, 4, order="pipelined"),
        """
        01........aa.bb2cc3dd......
        .01.....aa.bb23...cc.dd....
        ..01..aa.bb23.......cc.dd..
        ...0aa1bb23...........cc.dd
        """,
    ),
    (
        gems(4, 4),
        """
        01.2cc3dd.aa..bb
        .0213.ccaaddbb..
        .2031.aaccbbdd..
        23.0aa1bb.cc..dd
        """,
    ),
    (
        gems(4, 4, replications=2),
        """
        0..2cc....aa1..3dd....bb
        .02...ccaa...13...ddbb..
        .20...aacc...31...bbdd..
        2..0aa....cc3..1bb....dd
        """,
    ),
    (
        forward_only(one_f_one_b(3, 4)),
        """
        0123..
        .0123.
        ..0123
        """,
    ),
]


@pytest.mark.parametrize(("schedule", "table"), TABLES)
def test_tables_as_drawn(schedule: Schedule, table: str) -> None:
    timeline = played(schedule)
    assert text(timeline.spans, unit=1) == drawn(table)
    assert timeline.makespan == len(drawn(table).splitlines()[0])
    for seat, row in enumerate(drawn(table).splitlines()):
        assert timeline.idle[seat] == pytest.approx(row.count(".") / len(row))


# ------------------------------------------------------------------------------------------------------------- laws

costs = st.builds(
    lambda seconds, kept, fixed, again, latency, bandwidth: (
        lambda stages: StageCosts(
            forward=tuple(seconds[s % len(seconds)] for s in range(stages)),
            backward=tuple(2 * seconds[(s + 1) % len(seconds)] for s in range(stages)),
            kept=(kept,) * stages,
            fixed=(fixed,) * stages,
            recompute=(again,) * stages,
            latency=latency,
            bandwidth=bandwidth,
        )
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 50),
    st.integers(0, 50),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from((0.5, 4.0, float("inf"))),
)


@given(programs(), costs)
def test_nothing_happens_twice_at_once_or_too_early(program: Program, make: object) -> None:
    priced: StageCosts = make(program.schedule.stages)  # pyright: ignore[reportCallIssue]
    timeline = simulate(program, priced)
    span_of = {span.action: span for span in timeline.spans}
    arrival = {transfer.parcel: transfer for transfer in timeline.transfers}
    for seat, row in enumerate(program.schedule.seats):
        ordered = [span_of[action] for action in row]
        assert all(a.end <= b.start for a, b in itertools.pairwise(ordered))
        for span in ordered:
            assert span.seat == seat
            assert span.end - span.start == pytest.approx(priced.seconds(span.action))
            needs = [p for p in needed_by(span.action, program.edges) if p in arrival]
            assert all(arrival[p].end <= span.start and span_of[p.made_by].end <= arrival[p].start for p in needs)
            previous = max((s.end for s in ordered if s.end <= span.start and s is not span), default=0.0)
            assert span.start == max([previous, *(arrival[p].end for p in needs)])
    for pair in {(t.source, t.target) for t in timeline.transfers}:
        busy = [t for t in timeline.transfers if (t.source, t.target) == pair]
        assert all(a.end <= b.start for a, b in itertools.pairwise(busy))


@given(programs(), costs)
def test_memory_begins_and_ends_with_what_is_fixed(program: Program, make: object) -> None:
    priced: StageCosts = make(program.schedule.stages)  # pyright: ignore[reportCallIssue]
    timeline = simulate(program, priced)
    for seat, line in enumerate(timeline.memory):
        fixed = sum(priced.fixed[stage] for _, stage in program.schedule.holds(seat))
        assert line[-1][1] == fixed
        assert min(size for _, size in line) >= fixed
        assert max(size for _, size in line) == timeline.peak[seat]
        assert [moment for moment, _ in line] == sorted({moment for moment, _ in line})


@given(st.integers(1, 6), st.integers(1, 8))
def test_memory_of_what_is_kept(stages: int, microbatches: int) -> None:
    kept = (100,) * stages
    assert played(sequential(stages, microbatches), kept=kept).peak == kept
    assert played(gpipe(stages, microbatches), kept=kept).peak == (100 * microbatches,) * stages
    expected = tuple(100 * min(microbatches, stages - stage) for stage in range(stages))
    assert played(one_f_one_b(stages, microbatches), kept=kept).peak == expected
    assert played(forward_only(gpipe(stages, microbatches)), kept=kept).peak == (0,) * stages
    assert max(played(gems(stages, microbatches, order="lean"), kept=kept).peak) == 100


def test_a_case_by_hand() -> None:
    """Two stages, two micro-batches, GPipe; 8 bytes at 4 a second and a latency of 1: a message takes 3 seconds."""
    program = with_messages(gpipe(2, 2), [Edge(("x", 0), 0, (1,), bytes=8)])
    timeline = simulate(program, StageCosts((2, 1), (4, 3), kept=(100, 50), fixed=(1000, 500), latency=1, bandwidth=4))
    found = {(span.action.kind, span.seat, span.action.microbatch): (span.start, span.end) for span in timeline.spans}
    assert found == {
        ("forward", 0, 0): (0, 2),
        ("forward", 0, 1): (2, 4),
        ("forward", 1, 0): (5, 6),  # x0 travels from 2 to 5
        ("forward", 1, 1): (8, 9),  # x1 waits for its channel: 5 to 8
        ("backward", 1, 0): (9, 12),
        ("backward", 1, 1): (12, 15),
        ("backward", 0, 0): (15, 19),
        ("backward", 0, 1): (19, 23),  # its gradient came at 18
    }
    assert timeline.makespan == 23
    assert timeline.idle == (1 - 12 / 23, 1 - 8 / 23)
    # Seat 0, from 4 to 5: both micro-batches, x0 and x1 on their way, and buffers for both gradients (the first is
    # posted before the second forward, at 2, the other before the first backward, at 4).
    assert timeline.peak[0] == 1000 + 200 + 16 + 16
    # Seat 1: the second receive is posted before the first forward, so both buffers stand from the beginning.
    assert timeline.memory[1][0] == (0, 516)
    assert timeline.peak[1] == 500 + 100


def test_recompute_runs_the_forward_again_and_keeps_the_inputs() -> None:
    program = chained(gpipe(2, 3), size=7)
    plain = StageCosts((1, 1), (2, 2), kept=(100, 100))
    again = replace(plain, recompute=(False, True))
    first, second = simulate(program, plain), simulate(program, again)
    lengths = {span.action: span.end - span.start for span in second.spans}
    assert lengths[Action("backward", 1, 0)] == 3
    assert lengths[Action("backward", 0, 0)] == 2
    assert first.peak[1] == 300
    # All three inputs, and what the repeated forward of one micro-batch leaves while its backward runs.
    assert second.peak[1] == 3 * 7 + 100
    own = simulate(program, replace(again, inputs=(50, 20)))
    assert own.peak[1] == 3 * 20 + 100


def test_eager_1f1b_hides_messages() -> None:
    costs = StageCosts((1,) * 8, (2,) * 8, latency=0.2)
    usual, eager = (simulate(chained(one_f_one_b(8, 32, way)), costs).makespan for way in (False, True))
    assert usual == pytest.approx(130.6)
    assert eager == pytest.approx(3 * (32 + 7) + 0.2 * 14)  # the messages of the way there and back, once


def test_a_ragged_last_microbatch_takes_its_share() -> None:
    program = chained(sequential(2, 2), size=8)
    timeline = simulate(program, StageCosts((1, 1), (2, 2), kept=(8, 8), sizes=(1, 0.5), bandwidth=8))
    assert timeline.makespan == 1.5 * (6 + 2)


def test_working_memory_exists_while_the_action_runs() -> None:
    timeline = played(sequential(1, 1), working=(30,), fixed=(5,), kept=(10,))
    assert timeline.memory == (((0.0, 35), (1.0, 45), (3.0, 5)),)


def test_numbers_that_do_not_fit_the_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="forward has 1 numbers for 2 stages"):
        simulate(chained(gpipe(2, 1)), StageCosts((1,), (2, 2)))
    with pytest.raises(PlanError, match="sizes has 1 numbers for 2 micro-batches"):
        simulate(chained(gpipe(1, 2)), StageCosts((1,), (2,), sizes=(1,)))
    with pytest.raises(PlanError, match="bandwidth"):
        simulate(chained(gpipe(1, 1)), StageCosts((1,), (2,), bandwidth=0))


def test_a_program_that_cannot_run_has_no_timeline() -> None:
    program = chained(gpipe(2, 1))
    with pytest.raises(PlanError, match="would not run to its end"):
        simulate(replace(program, seats=(program.seats[0][:-2], program.seats[1])), StageCosts((1, 1), (2, 2)))
