"""Schedules: each table as it is drawn, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural.errors import PlanError
from mural.pipeline.gems import before, gems, turns
from mural.pipeline.schedule import (
    Action,
    Schedule,
    forward_only,
    gpipe,
    grouped,
    interleaved,
    one_f_one_b,
    sequential,
)  # fmt: skip

sizes = st.integers(1, 9)
counts = st.integers(1, 20)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages, microbatches = draw(sizes), draw(counts)
    orders = st.sampled_from(("lean", "pipelined", "interleaved"))
    return draw(
        st.one_of(
            st.just(sequential(stages, microbatches)),
            st.integers(1, stages).map(lambda seats: sequential(stages, microbatches, seats)),
            st.just(gpipe(stages, microbatches)),
            st.booleans().map(lambda eager: one_f_one_b(stages, microbatches, eager)),
            st.integers(1, 4).map(lambda chunks: interleaved(stages, chunks, microbatches)),
            st.builds(lambda n, order: gems(stages, microbatches, n, order), st.integers(1, 6), orders),
        )
    )


def units(schedule: Schedule, backward: int = 2) -> int:
    """The time that a schedule takes if each action runs as soon as it can; raises if it cannot."""
    finished: dict[Action, int] = {}
    at, free = [0] * len(schedule.seats), [0] * len(schedule.seats)
    while any(at[seat] < len(row) for seat, row in enumerate(schedule.seats)):
        before_round = list(at)
        for seat, row in enumerate(schedule.seats):
            while at[seat] < len(row) and all(d in finished for d in before(row[at[seat]], schedule.stages)):
                action = row[at[seat]]
                start = max([free[seat], *(finished[d] for d in before(action, schedule.stages))])
                free[seat] = finished[action] = start + (1 if action.kind == "forward" else backward)
                at[seat] += 1
        if at == before_round:
            raise AssertionError(f"nothing can run at {at} of\n{schedule}")
    return max(free)


def most_held(row: tuple[Action, ...]) -> int:
    """The largest number of micro-batches that went forward and not yet backward."""
    return max(accumulate(1 if action.kind == "forward" else -1 for action in row), default=0)


# ------------------------------------------------------------------------------------------------------------- laws


@given(schedules())
def test_each_microbatch_goes_once_through_each_stage_of_its_replica(schedule: Schedule) -> None:
    found = [action for row in schedule.seats for action in row]
    assert sorted(found) == sorted(schedule.actions())
    assert len(schedule.replica_of) == schedule.microbatches
    for seat, row in enumerate(schedule.seats):
        assert {(a.replica, a.stage) for a in row} <= set(schedule.holds(seat))
    assert set(schedule.seat_of) == {(r, s) for r in range(schedule.replicas) for s in range(schedule.stages)}


@given(schedules())
def test_everything_can_run_in_the_order_of_the_lists(schedule: Schedule) -> None:
    units(schedule)
    units(forward_only(schedule))


@given(schedules())
def test_stages_take_microbatches_in_order(schedule: Schedule) -> None:
    for row in schedule.seats:
        for key in {(a.kind, a.replica, a.stage) for a in row}:
            order = [a.microbatch for a in row if (a.kind, a.replica, a.stage) == key]
            assert order == sorted(order)


@given(schedules())
def test_forward_only_keeps_the_forwards_and_their_order(schedule: Schedule) -> None:
    inference = forward_only(schedule)
    assert inference.seats == tuple(tuple(a for a in row if a.kind == "forward") for row in schedule.seats)
    assert inference.seat_of == schedule.seat_of


@given(sizes, counts)
def test_how_many_microbatches_a_seat_holds(stages: int, microbatches: int) -> None:
    assert {most_held(row) for row in sequential(stages, microbatches).seats} == {1}
    assert {most_held(row) for row in gpipe(stages, microbatches).seats} == {microbatches}
    for stage, row in enumerate(one_f_one_b(stages, microbatches).seats):
        assert most_held(row) == min(stages - stage, microbatches)
    for stage, row in enumerate(one_f_one_b(stages, microbatches, eager=True).seats):
        assert most_held(row) == min(2 * (stages - stage) - 1, microbatches)
    for row in gems(stages, microbatches, 2, "lean").seats:
        assert most_held(row) == 1


@given(sizes, counts, st.integers(1, 4))
def test_how_many_microbatches_an_instance_of_gems_holds(stages: int, microbatches: int, replications: int) -> None:
    schedule = gems(stages, microbatches, replications)
    turn = -(-((microbatches + 1) // 2) // replications)
    for seat, row in enumerate(schedule.seats):
        assert most_held(row) <= stages + 1
        for replica, stage in schedule.holds(seat):
            held = most_held(tuple(a for a in row if (a.replica, a.stage) == (replica, stage)))
            assert held <= min(stages - stage, turn)


# ------------------------------------------------------------------------------------------------------------ times


@given(sizes, counts)
def test_times_of_one_direction(stages: int, microbatches: int) -> None:
    assert units(sequential(stages, microbatches)) == 3 * stages * microbatches
    assert units(gpipe(stages, microbatches)) == 3 * (stages + microbatches - 1)
    for eager in (False, True):
        assert units(one_f_one_b(stages, microbatches, eager)) == 3 * (stages + microbatches - 1)


@given(sizes, st.integers(1, 5), st.integers(0, 30))
def test_interleaved_has_no_holes_for_any_number_of_microbatches(seats: int, chunks: int, more: int) -> None:
    microbatches = seats + more
    assert units(interleaved(seats, chunks, microbatches)) == 3 * chunks * microbatches + 3 * (seats - 1)


@pytest.mark.parametrize(("order", "expected"), [("lean", 21), ("pipelined", 21), ("interleaved", 12)])
def test_gems_for_four_stages_and_two_images(order: str, expected: int) -> None:
    assert units(gems(4, 2, order=order)) == expected  # pyright: ignore[reportArgumentType]
    assert units(sequential(4, 2)) == 24


@given(st.integers(2, 10), st.integers(1, 12))
def test_interleaved_gems_is_at_least_as_fast_as_one_direction(stages: int, pairs: int) -> None:
    assert units(gems(stages, 2 * pairs)) <= units(one_f_one_b(stages, 2 * pairs))
    assert units(gems(stages, 2 * pairs, pairs, "lean")) <= units(sequential(stages, 2 * pairs))


# ----------------------------------------------------------------------------------------------------------- tables


def rows(text: str) -> str:
    return "\n".join(f"seat {seat}: {row}" for seat, row in enumerate(text.strip().splitlines()))


def lines(text: str) -> str:
    return rows("\n".join(line.strip() for line in text.strip().splitlines()))


def test_sequential_as_drawn() -> None:
    assert str(sequential(3, 2)) == lines("""
        F0 B0 F1 B1
        F0 B0 F1 B1
        F0 B0 F1 B1
    """)
    assert str(sequential(3, 2, seats=2)) == lines("""
        F0@0 F0@2 B0@2 B0@0 F1@0 F1@2 B1@2 B1@0
        F0@1 B0@1 F1@1 B1@1
    """)


def test_gpipe_as_drawn() -> None:
    assert str(gpipe(3, 4)) == lines("""
        F0 F1 F2 F3 B0 B1 B2 B3
        F0 F1 F2 F3 B0 B1 B2 B3
        F0 F1 F2 F3 B0 B1 B2 B3
    """)


def test_one_f_one_b_as_drawn() -> None:
    assert str(one_f_one_b(3, 4)) == lines("""
        F0 F1 F2 B0 F3 B1 B2 B3
        F0 F1 B0 F2 B1 F3 B2 B3
        F0 B0 F1 B1 F2 B2 F3 B3
    """)
    assert str(one_f_one_b(3, 1)) == lines("F0 B0\nF0 B0\nF0 B0")


def test_interleaved_is_megatrons_order_where_that_exists() -> None:
    # Megatron-LM, 2 ranks, 2 chunks, 4 micro-batches: 4 forwards ahead on rank 0, 2 on rank 1.
    assert str(interleaved(2, 2, 4)) == lines("""
        F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0
        F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1
    """)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_interleaved_by_megatrons_formula(seats: int, chunks: int, groups: int) -> None:
    total = seats * chunks * groups

    def chunk(
        k: int, forward: bool
    ) -> int:  # as its schedules.py finds the model chunk of the k-th virtual micro-batch
        found = k % (seats * chunks) // seats
        return found if forward else chunks - 1 - found

    def work(k: int, seat: int, forward: bool) -> Action:
        microbatch = k // (seats * chunks) * seats + k % seats
        return Action("forward" if forward else "backward", chunk(k, forward) * seats + seat, microbatch)

    for seat, row in enumerate(interleaved(seats, chunks, seats * groups).seats):
        ahead = min(total, 2 * (seats - seat - 1) + (chunks - 1) * seats)
        expected = [work(k, seat, True) for k in range(ahead)]
        for k in range(total - ahead):
            expected += [work(k + ahead, seat, True), work(k, seat, False)]
        expected += [work(k, seat, False) for k in range(total - ahead, total)]
        assert row == tuple(expected)


def test_gems_as_drawn() -> None:
    assert str(gems(3, 3)) == lines("""
        F0@0 F1@0 F2@2 B2@2 B0@0 B1@0
        F0@1 F2@1 F1@1 B0@1 B2@1 B1@1
        F2@0 F0@2 B0@2 F1@2 B1@2 B2@0
    """)
    assert str(gems(2, 4, 2, "lean")) == lines("""
        F0@0 B0@0 F2@1 B2@1 F1@0 B1@0 F3@1 B3@1
        F0@1 B0@1 F2@0 B2@0 F1@1 B1@1 F3@0 B3@0
    """)
    assert str(gems(2, 4, 1, "pipelined")) == lines("""
        F0@0 F1@0 B0@0 B1@0 F2@1 B2@1 F3@1 B3@1
        F0@1 B0@1 F1@1 B1@1 F2@0 F3@0 B2@0 B3@0
    """)


def test_gems_with_one_microbatch_leaves_the_second_replica_without_work() -> None:
    for order in ("lean", "pipelined", "interleaved"):
        assert str(gems(2, 1, 3, order)) == lines("F0@0 B0@0\nF0@1 B0@1")


@pytest.mark.parametrize(
    "make", [lambda: gpipe(0, 1), lambda: one_f_one_b(2, 0), lambda: interleaved(2, 0, 1), lambda: gems(2, 2, 0)]
)
def test_sizes_below_one_are_refused(make: object) -> None:
    with pytest.raises(PlanError, match="at least one"):
        make()  # pyright: ignore[reportCallIssue]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(PlanError, match="interleaved"):
        gems(2, 2, 1, "fast")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seats", [(0, 1), (0, 1, 1, 0), (0, 2, 0), (1, 2, 1), (1, 1, 1), (0, 1, -1), (0, 0, 2)])
def test_each_stage_has_a_seat_and_each_seat_a_stage(seats: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="give each stage a seat, and leave none out"):
        sequential(3, 1, seats)
    with pytest.raises(PlanError, match="give each stage a seat"):
        sequential(0, 1, ())


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (-1, 1), (2, 2, 0), (2, 2, -1), (2, 0, (0, 1)), (2, 0, 1)])
def test_a_sequence_of_nothing_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="at least one; give"):
        sequential(*arguments)


def test_seats_that_share_stages_as_drawn() -> None:
    assert str(sequential(5, 1, seats=(0, 1, 2, 1, 0))) == lines("""
        F0@0 F0@4 B0@4 B0@0
        F0@1 F0@3 B0@3 B0@1
        F0@2 B0@2
    """)
    assert str(sequential(2, 1, seats=9)) == lines("F0 B0\nF0 B0")
    assert sequential(3, 2, seats=(0, 1, 0)).seat_of == {(0, 0): 0, (0, 1): 1, (0, 2): 0}
    assert sequential(3, 2, seats=2).holds(0) == ((0, 0), (0, 2))
    assert gems(3, 2).holds(0) == ((0, 0), (1, 2))


def test_actions_in_words() -> None:
    assert str(Action("forward", 1, 2)) == "forward of stage 1, micro-batch 2"
    assert str(Action("backward", 0, 3, 1)) == "backward of stage 0, micro-batch 3, replica 1"
    assert len(sequential(2, 3).actions()) == 12


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, lambda s, m: interleaved(s, 1, m), lambda s, m: gems(s, m)])
def test_every_size_is_looked_at(make: Callable[[int, int], Schedule]) -> None:
    for stages, microbatches in ((0, 1), (1, 0), (-1, 2), (2, -3)):
        with pytest.raises(PlanError, match="at least one"):
            make(stages, microbatches)
    assert make(1, 1).seats[0][-1] == Action("backward", 0, 0)


def test_other_sizes_are_looked_at() -> None:
    for make in (lambda: interleaved(2, 0, 2), lambda: gems(2, 2, 0), lambda: gems(2, 2, -1)):
        with pytest.raises(PlanError, match="at least one"):
            make()


def test_lists_after_an_eager_beginning_as_drawn() -> None:
    assert str(one_f_one_b(3, 6, eager=True)) == lines("""
        F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5
        F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    """)


def test_groups_of_interleaved_are_near_equal() -> None:
    assert [[*group] for group in grouped(7, 3)] == [[0, 1, 2], [3, 4, 5, 6]]
    assert [[*group] for group in grouped(2, 3)] == [[0, 1]]
    assert [[*group] for group in grouped(6, 3)] == [[0, 1, 2], [3, 4, 5]]
    assert [[*group] for group in grouped(11, 3)] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]


def test_turns_of_gems_are_near_equal() -> None:
    assert turns(range(3, 10), 3) == [range(3, 6), range(6, 8), range(8, 10)]
    assert turns(range(4), 2) == [range(2), range(2, 4)]
    assert [len(turn) for turn in turns(range(2), 4)] == [1, 0, 1, 0]


def test_gems_places_replicas_in_opposite_order() -> None:
    schedule = gems(3, 5)
    assert schedule.seat_of == {(0, 0): 0, (1, 2): 0, (0, 1): 1, (1, 1): 1, (0, 2): 2, (1, 0): 2}
    assert schedule.replica_of == (0, 0, 0, 1, 1)
    assert (schedule.replicas, schedule.stages, schedule.microbatches) == (2, 3, 5)
    assert gems(3, 4).replica_of == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("microbatches", "replications", "most"), [(6, 2, 2), (10, 2, 3), (6, 3, 1), (6, 9, 1), (6, 1, 3)]
)
def test_an_instance_of_gems_holds_a_turn(microbatches: int, replications: int, most: int) -> None:
    """A turn of a half that does not divide evenly is rounded up."""
    schedule = gems(4, microbatches, replications)
    row = [action for action in schedule.seats[0] if action.replica == 0]
    assert most_held(tuple(row)) == most
