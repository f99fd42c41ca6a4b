"""The checker: its verdict is what happens, between threads and between processes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from channels import Happened, Stuck, execute, on_threads
from hypothesis import HealthCheck, assume, given, settings
from programs import MAKERS, programs, tampered

from mural.errors import PlanError
from mural.pipeline.checker import check
from mural.pipeline.schedule import Action, gpipe, one_f_one_b, sequential
from mural.pipeline.transfers import Edge, Parcel, Program, Receive, Send, with_messages
from ranks import restart, run_on

CHAIN = (Edge(("x", 0), 0, (1,)), Edge(("y", 0), 1, (2,)), Edge(("skip", 0), 0, (2,)))


@given(programs(stages=9, microbatches=12))
def test_every_schedule_with_any_edges_is_sound(program: Program) -> None:
    for strict in (False, True):
        verdict = check(program, strict)
        assert verdict.ok, str(verdict)
        verdict.require()


@settings(max_examples=120)
@given(tampered())
def test_the_verdict_is_what_happens(program: Program) -> None:
    for strict in (False, True):
        verdict = check(program, strict)
        ends, unreceived = on_threads(program, strict)
        assert [(outcome.end, outcome.at) for outcome in verdict.outcomes] == ends
        left: dict[tuple[int, int], list[Parcel]] = {}
        for channel, parcel in verdict.unreceived:
            left.setdefault(channel, []).append(parcel)
        assert left == unreceived
        assert verdict.ok == (all(end == "done" for end, _ in ends) and not unreceived and not verdict.miscounted)
        assert str(verdict)


# ------------------------------------------------------------------------------------------- what the verdict says


def tampered_with(program: Program, seat: int, *row: Any) -> Program:
    return replace(program, seats=(*program.seats[:seat], row, *program.seats[seat + 1 :]))


def test_a_deadlock_names_its_cycle() -> None:
    program = with_messages(one_f_one_b(2, 2), [Edge(("x", 0), 0, (1,))], prefetch=0)
    first, send, *rest = program.seats[0]
    back = next(step for step in rest if isinstance(step, Receive))
    # The first send moves behind the backward that waits for the other seat's answer to it.
    place = rest.index(back) + 2
    verdict = check(tampered_with(program, 0, first, *rest[:place], send, *rest[place:]))
    assert [outcome.end for outcome in verdict.outcomes] == ["stuck", "wrong"]
    swapped = tampered_with(program, 0, first, back, Action("backward", 0, 0), send)
    verdict = check(swapped)
    assert verdict.cycle() == (0, 1, 0)
    assert "a cycle: seat 0 waits for seat 1 waits for seat 0" in str(verdict)
    with pytest.raises(PlanError, match="would not run to its end"):
        verdict.require()


def test_a_swapped_pair_of_receives_is_found_and_both_messages_are_named() -> None:
    program = with_messages(gpipe(2, 2), [Edge(("x", 0), 0, (1,))])
    row = list(program.seats[1])
    first, second = [i for i, step in enumerate(row) if isinstance(step, Receive)][:2]
    row[first], row[second] = row[second], row[first]
    verdict = check(tampered_with(program, 1, *row))
    assert verdict.outcomes[1].end == "wrong"
    told = "expects value x of micro-batch 0 (stage 0 to 1) from seat 0 and gets value x of micro-batch 1"
    assert told in str(verdict)


def test_a_message_that_nobody_receives_is_found() -> None:
    program = with_messages(sequential(2, 1), [Edge(("x", 0), 0, (1,), gradient=False)])
    extra = program.seats[0][-2]
    assert isinstance(extra, Send)
    doubled = tampered_with(program, 0, *program.seats[0], extra)
    assert [outcome.end for outcome in check(doubled, strict=False).outcomes] == ["done", "done"]
    assert [outcome.end for outcome in check(doubled, strict=True).outcomes] == ["stuck", "done"]
    for strict in (False, True):
        assert not check(doubled, strict).ok
        assert "which never receives it" in str(check(doubled, strict))


def test_a_message_that_is_never_sent_is_found() -> None:
    program = with_messages(one_f_one_b(3, 2), CHAIN)
    row = [step for step in program.seats[0] if not (isinstance(step, Send) and step.parcel.edge == CHAIN[2])]
    verdict = check(tampered_with(program, 0, *row))
    assert "seat 2 waits before its forward of stage 2, micro-batch 0 for seat 0 to send value skip" in str(verdict)


def test_an_action_that_is_left_out_or_doubled_is_found() -> None:
    program = with_messages(gpipe(2, 1), [])
    for row in ((Action("forward", 0, 0),), (*program.seats[0], Action("backward", 0, 0))):
        verdict = check(tampered_with(program, 0, *row))
        assert not verdict.ok
        assert "backward of stage 0, micro-batch 0 is not in the list of its seat exactly once" in str(verdict)


# ------------------------------------------------------------------------------------------------------- on processes

PATIENCE = 5.0


class GroupMail:
    """A seat's end of two process groups: one for messages to higher seats, one for messages to lower ones."""

    def __init__(self, up: Any, down: Any, codes: list[Parcel]) -> None:
        self.up, self.down, self.codes, self.seat = up, down, codes, dist.get_rank()

    def send(self, parcel: Parcel, peer: int) -> Any:
        group = self.up if peer > self.seat else self.down
        return group.send([torch.tensor([self.codes.index(parcel)])], peer, 0), None

    def post(self, peer: int) -> Any:
        buffer = torch.full((1,), -1)
        group = self.up if peer < self.seat else self.down
        return group.recv([buffer], peer, 0), buffer

    def received(self, ticket: Any) -> Parcel:
        self.delivered(ticket)
        return self.codes[int(ticket[1])]

    def delivered(self, ticket: Any) -> None:
        if not ticket[0].over.wait(PATIENCE):
            raise Stuck
        ticket[0].wait(timedelta(seconds=PATIENCE))


def on_this_rank(program: Program) -> Happened:
    """How this rank's seat ends, on groups of its own: a program that got stuck leaves its group in use."""
    dist.barrier()
    codes = list(dict.fromkeys(s.parcel for row in program.seats for s in row if isinstance(s, Send | Receive)))
    mail = GroupMail(dist.new_group(), dist.new_group(), codes)
    dist.barrier()
    return execute(program, dist.get_rank(), mail, strict=True)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(tampered(stages=3, microbatches=3))
def test_the_verdict_is_what_happens_on_a_strict_transport(program: Program) -> None:
    messages = [(seat, s) for seat, row in enumerate(program.seats) for s in row if isinstance(s, Send | Receive)]
    assume(len(program.seats) == 3 and messages and all(seat != s.peer for seat, s in messages))
    ends = run_on(3, on_this_rank, program, backend="strict")
    assert ends == [(outcome.end, outcome.at) for outcome in check(program, strict=True).outcomes]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"interleaved", "sequential on fewer seats"}))
def test_every_schedule_runs_on_a_strict_transport(name: str) -> None:
    program = with_messages(MAKERS[name](3, 5), CHAIN)
    assert {end for end, _ in run_on(3, on_this_rank, program, backend="strict")} == {"done"}


@pytest.fixture(scope="module", autouse=True)
def _fresh_ranks() -> Any:
    """Ranks with programs that got stuck still wait for messages: others need new ones."""
    yield
    restart(3, backend="strict")


# ------------------------------------------------------------------------------------------------- edges and messages


@pytest.mark.parametrize("edge", [
    Edge(("x", 0), -1, (1,)), Edge(("x", 0), 1, (1,)), Edge(("x", 0), 1, (0,)), Edge(("x", 0), 0, (3,)),
    Edge(("x", 0), 0, (1, 3)), Edge(("x", 0), 0, (1, 1)), Edge(("x", 0), 0, (1,), bytes=-1),
])  # fmt: skip
def test_an_edge_leads_to_later_stages_each_named_once(edge: Edge) -> None:
    with pytest.raises(PlanError, match="leads from one of 3 stages to later ones, each named once"):
        with_messages(gpipe(3, 1), [Edge(("y", 0), 0, (1, 2)), edge])


def test_two_edges_carry_two_values() -> None:
    with pytest.raises(PlanError, match="two edges carry the same value"):
        with_messages(gpipe(3, 1), [Edge(("x", 0), 0, (1,)), Edge(("x", 0), 0, (2,))])
    assert with_messages(gpipe(3, 1), [Edge(("x", 0), 0, (1,)), Edge(("x", 1), 0, (2,))]).edges[1].bytes == 0
    with pytest.raises(PlanError, match="prefetch = -1"):
        with_messages(gpipe(3, 1), CHAIN, prefetch=-1)


def told(program: Program, seat: int) -> str:
    """A seat's list in short: F0 and B0 are computed, <x0 is the receive of x of micro-batch 0, >x0 its send."""
    words: list[str] = []
    for step in program.seats[seat]:
        if isinstance(step, Action):
            words.append(f"{step.kind[0].upper()}{step.microbatch}")
        else:
            sign = "<" if isinstance(step, Receive) else ">"
            grad = "'" if step.parcel.work == "backward" else ""
            words.append(f"{sign}{step.parcel.edge.value[0]}{grad}{step.parcel.microbatch}@{step.peer}")
    return " ".join(words)


def test_messages_as_drawn() -> None:
    edges = (*CHAIN, Edge(("n", 0), 1, (2,), gradient=False))
    lists = [told(with_messages(one_f_one_b(3, 2), edges, prefetch=n), seat) for n in (0, 1, 2) for seat in range(3)]
    assert lists[:3] == [
        "F0 >x0@1 >skip0@2 F1 >x1@1 >skip1@2 <x'0@1 <skip'0@2 B0 <x'1@1 <skip'1@2 B1",
        "<x0@0 F0 >y0@2 >n0@2 <x1@0 F1 >y1@2 >n1@2 <y'0@2 B0 >x'0@0 <y'1@2 B1 >x'1@0",
        "<skip0@0 <y0@1 <n0@1 F0 B0 >y'0@1 >skip'0@0 <skip1@0 <y1@1 <n1@1 F1 B1 >y'1@1 >skip'1@0",
    ]
    assert lists[3:6] == [
        "F0 >x0@1 >skip0@2 <x'0@1 <skip'0@2 F1 >x1@1 >skip1@2 <x'1@1 <skip'1@2 B0 B1",
        "<x0@0 <x1@0 F0 >y0@2 >n0@2 <y'0@2 F1 >y1@2 >n1@2 <y'1@2 B0 >x'0@0 B1 >x'1@0",
        "<skip0@0 <y0@1 <n0@1 F0 <skip1@0 <y1@1 <n1@1 B0 >y'0@1 >skip'0@0 F1 B1 >y'1@1 >skip'1@0",
    ]
    assert lists[6].startswith("<x'0@1 <skip'0@2 F0 >x0@1 >skip0@2 <x'1@1")


def test_a_receive_takes_those_before_it_in_its_channel_along() -> None:
    """Of one channel: what is sent first is received first, however late it is needed."""
    late, early = Edge(("late", 0), 0, (2,)), Edge(("early", 0), 1, (3,))
    schedule = sequential(4, 1, seats=(0, 0, 1, 1))
    first = with_messages(schedule, [late, early], prefetch=0)
    assert told(first, 1) == "<late0@0 F0 <early0@0 F0 B0 >early'0@0 B0 >late'0@0"
    crossed = [Edge(("a", 0), 0, (3,)), Edge(("b", 0), 1, (2,))]
    assert told(with_messages(schedule, crossed, prefetch=0), 1) == "<a0@0 <b0@0 F0 F0 B0 >a'0@0 B0 >b'0@0"


def test_parcels_in_words() -> None:
    edge = Edge(("conv", 2), 0, (1,))
    value, gradient = Parcel(edge, "forward", 0, 1, 3, 1), Parcel(edge, "backward", 1, 0, 3, 1)
    assert str(value) == "value conv[2] of micro-batch 3 (stage 0 to 1)"
    assert str(gradient) == "gradient conv[2] of micro-batch 3 (stage 1 to 0)"
    assert str(Parcel(Edge((7, 0), 0, (1,)), "forward", 0, 1, 0)) == "value 7 of micro-batch 0 (stage 0 to 1)"
    assert (value.made_by, value.needed_by) == (Action("forward", 0, 3, 1), Action("forward", 1, 3, 1))
    assert (gradient.made_by, gradient.needed_by) == (Action("backward", 1, 3, 1), Action("backward", 0, 3, 1))
