"""Messages: in the order of their channel, behind what makes them, posted in time and no earlier."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import edges, programs, schedules

from mural.errors import PlanError
from mural.pipeline.schedule import Action, one_f_one_b
from mural.pipeline.transfers import Edge, Parcel, Program, Receive, Send, made_by, needed_by, posting, with_messages


def channels(program: Program, kind: type) -> dict[tuple[int, int], list[Parcel]]:
    """What each channel carries (from, to), in the order in which one side lists it."""
    found: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
    for seat, row in enumerate(program.seats):
        for step in row:
            if isinstance(step, kind):
                found[(seat, step.peer) if kind is Send else (step.peer, seat)].append(step.parcel)
    return dict(found)


@given(programs())
def test_receives_are_posted_in_the_order_of_the_sends(program: Program) -> None:
    assert channels(program, Send) == channels(program, Receive)


@given(programs())
def test_sends_stand_right_behind_what_makes_them(program: Program) -> None:
    for row in program.seats:
        last: Action | None = None
        for i, step in enumerate(row):
            if isinstance(step, Send):
                assert step.parcel.made_by == last
                assert not isinstance(row[i - 1], Receive)
            elif isinstance(step, Action):
                last = step


@given(programs())
def test_what_crosses_is_what_is_needed_and_made_elsewhere(program: Program) -> None:
    seat_of = program.schedule.seat_of
    crossing = [
        parcel
        for row in program.schedule.seats
        for action in row
        for parcel in needed_by(action, program.edges)
        if seat_of[parcel.replica, parcel.source] != seat_of[parcel.replica, parcel.target]
    ]
    sent = [parcel for parcels in channels(program, Send).values() for parcel in parcels]
    assert len(set(sent)) == len(sent)
    assert set(sent) == set(crossing)
    for row in program.schedule.seats:
        for action in row:
            assert all(parcel.made_by == action for parcel in made_by(action, program.edges))


@given(st.data(), st.integers(0, 3))
def test_receives_are_posted_as_late_as_prefetch_and_order_allow(data: st.DataObject, prefetch: int) -> None:
    schedule = data.draw(schedules())
    program = with_messages(schedule, data.draw(edges(schedule.stages)), prefetch)
    for seat, row in enumerate(program.seats):
        assert tuple(step for step in row if isinstance(step, Action)) == schedule.seats[seat]
        places = {action: i for i, action in enumerate(schedule.seats[seat])}
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by peer: where it stands, where it is wanted
        computed = 0
        for step in row:
            if isinstance(step, Receive):
                found[step.peer].append((computed, max(0, places[step.parcel.needed_by] - prefetch)))
            computed += isinstance(step, Action)
        for pairs in found.values():
            for number, (stands, _) in enumerate(pairs):
                assert stands == min(wanted for _, wanted in pairs[number:])


def test_the_order_that_is_drawn() -> None:
    edge = Edge(("x", 0), 0, (1,))
    first, second, third = (Parcel(edge, "forward", 0, 1, microbatch) for microbatch in range(3))
    spare = [Action("backward", 1, microbatch) for microbatch in range(2)]
    row = [first.needed_by, spare[0], third.needed_by, spare[1], second.needed_by]
    places = {action: i for i, action in enumerate(row)}
    assert posting([first, second, third], places, prefetch=1) == [0, 1, 1]
    assert posting([first, second, third], places, prefetch=0) == [0, 2, 2]


def test_a_program_as_text() -> None:
    skip = Edge(("skip", 0), 0, (1, 2), bytes=8)
    program = with_messages(one_f_one_b(3, 1), [skip, Edge(("mask", 0), 1, (2,), gradient=False)])

    def word(step: object) -> str:
        if isinstance(step, Send | Receive):
            arrow = "->" if isinstance(step, Send) else "<-"
            return f"{step.parcel.edge.value[0]}{'' if step.parcel.work == 'forward' else chr(39)}{arrow}{step.peer}"
        return step.kind[0].upper() if isinstance(step, Action) else "?"

    assert [" ".join(map(word, row)) for row in program.seats] == [
        "skip'<-1 skip'<-2 F skip->1 skip->2 B",
        "skip<-0 F mask->2 B skip'->0",
        "skip<-0 mask<-1 F B skip'->0",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        [Edge(("x", 0), 1, (1,))],
        [Edge(("x", 0), 1, (0,))],
        [Edge(("x", 0), 0, (3,))],
        [Edge(("x", 0), 0, (1, 1))],
        [Edge(("x", 0), 0, (1,)), Edge(("x", 0), 0, (2,))],
    ],
)
def test_edges_that_lead_nowhere_are_refused(wrong: list[Edge]) -> None:
    with pytest.raises(PlanError, match="edge"):
        with_messages(one_f_one_b(3, 1), wrong)


def test_a_negative_prefetch_is_refused() -> None:
    with pytest.raises(PlanError, match="prefetch"):
        with_messages(one_f_one_b(2, 1), [], prefetch=-1)
