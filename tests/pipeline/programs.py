"""Random programs: schedules of all kinds with random edges, and lists that were tampered with."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from mural.pipeline.gems import gems
from mural.pipeline.schedule import Schedule, forward_only, gpipe, interleaved, one_f_one_b, sequential
from mural.pipeline.transfers import Edge, Program, Receive, Send, Step, with_messages

MAKERS = {
    "sequential": sequential,
    "sequential on fewer seats": lambda stages, microbatches: sequential(stages, microbatches, max(1, stages // 2)),
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b eager": lambda stages, microbatches: one_f_one_b(stages, microbatches, eager=True),
    "interleaved": lambda stages, microbatches: interleaved(max(1, stages // 2), 2, microbatches),
    "gems lean": lambda stages, microbatches: gems(stages, microbatches, 2, "lean"),
    "gems pipelined": lambda stages, microbatches: gems(stages, microbatches, 1, "pipelined"),
    "gems interleaved": lambda stages, microbatches: gems(stages, microbatches),
}


@st.composite
def schedules(draw: st.DrawFn, stages: int = 6, microbatches: int = 7) -> Schedule:
    make = MAKERS[draw(st.sampled_from(sorted(MAKERS)))]
    schedule = make(draw(st.integers(1, stages)), draw(st.integers(1, microbatches)))
    return forward_only(schedule) if draw(st.integers(0, 5)) == 0 else schedule


@st.composite
def edges(draw: st.DrawFn, stages: int) -> tuple[Edge, ...]:
    """A chain (some links missing), skips, values with several consumers, some without gradient, of any size."""
    found: list[Edge] = []
    for producer in range(stages - 1):
        for number in range(draw(st.integers(0, 2))):
            later = st.lists(st.integers(producer + 1, stages - 1), min_size=1, max_size=3, unique=True)
            consumers = tuple(draw(later)) if number or draw(st.booleans()) else (producer + 1,)
            gradient = draw(st.integers(0, 3)) > 0
            found.append(Edge((f"s{producer}", number), producer, consumers, gradient, draw(st.integers(0, 9))))
    return tuple(draw(st.permutations(found)))


@st.composite
def programs(draw: st.DrawFn, stages: int = 6, microbatches: int = 7) -> Program:
    schedule = draw(schedules(stages, microbatches))
    return with_messages(schedule, draw(edges(schedule.stages)), draw(st.integers(0, 3)))


@st.composite
def tampered(draw: st.DrawFn, stages: int = 4, microbatches: int = 4) -> Program:
    """A program with up to three changes: swaps, deletions, copies, moves, other peers; most of messages."""
    program = draw(programs(stages, microbatches))
    lists = [list(row) for row in program.seats]
    for _ in range(draw(st.integers(0, 3))):
        seat = draw(st.integers(0, len(lists) - 1))
        among = lists[seat]
        messages = [i for i, step in enumerate(among) if isinstance(step, Send | Receive)]
        if not among:
            continue
        focus = messages if messages and draw(st.integers(0, 2)) else list(range(len(among)))
        first, second = draw(st.sampled_from(focus)), draw(st.sampled_from(focus))
        change(draw(st.sampled_from(CHANGES)), lists, seat, first, second, draw(st.integers(0, len(lists) - 1)))
    return replace(program, seats=tuple(map(tuple, lists)))


CHANGES = ("swap", "neighbours", "delete", "copy", "move", "give", "peer")


def change(kind: str, lists: list[list[Step]], seat: int, first: int, second: int, other: int) -> None:
    """Tamper with a list in one way."""
    row = lists[seat]
    if kind == "swap":
        row[first], row[second] = row[second], row[first]
    elif kind == "neighbours" and first + 1 < len(row):
        row[first], row[first + 1] = row[first + 1], row[first]
    elif kind == "delete":
        del row[first]
    elif kind == "copy":
        row.insert(second, row[first])
    elif kind == "move":
        row.insert(second, row.pop(first))
    elif kind == "give":
        lists[other].insert(min(second, len(lists[other])), row.pop(first))
    elif kind == "peer" and isinstance(step := row[first], Send | Receive) and other != seat:
        row[first] = replace(step, peer=other)
