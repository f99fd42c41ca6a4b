"""Chrome traces: the notes of all ranks as the JSON that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from mural.profile.account import Notes

Event = dict[str, Any]
MICRO = 1e6


def chrome_trace(notes: Sequence[Notes]) -> str:
    """The trace as JSON: a process for each rank, in it a row of steps, actions and waits, and messages under way."""
    start = min((step.begin + note.shift for note in notes for step in note.steps), default=0.0)
    found = [event for note in notes for event in events(note, start)]
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}, separators=(",", ":"))


def events(note: Notes, start: float) -> Iterator[Event]:
    """The events of one rank, in microseconds from the first step of all."""

    def at(when: float) -> float:
        return round((when + note.shift - start) * MICRO, 3)

    def span(name: str, category: str, begin: float, end: float, **words: Any) -> Event:
        times = {"ts": at(begin), "dur": round((end - begin) * MICRO, 3)}
        return {"ph": "X", "name": name, "cat": category, "pid": note.rank, "tid": 0, **times, "args": words}

    yield {"ph": "M", "name": "process_name", "pid": note.rank, "args": {"name": f"rank {note.rank}"}}
    yield {"ph": "M", "name": "thread_name", "pid": note.rank, "tid": 0, "args": {"name": "steps"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": note.rank, "args": {"sort_index": note.rank}}
    for step in note.steps:
        yield span(f"step {step.number}", "step", step.begin, step.end)
        if step.data > 0:
            yield span("images", "data", step.begin, min(step.begin + step.data, step.end))
    for name, begin, end in note.actions:
        yield span(name, "stage", begin, end)
    for wait in note.trace.waits:
        yield span(wait.kind, "wait", wait.begin, wait.end, needs=[rank for rank, _ in wait.needs])
    # Messages overlap each other and the work, so they are not nested spans but pairs of a begin and an end.
    for number, flight in enumerate(note.trace.flights):
        common = {"name": flight.kind, "cat": "messages", "pid": note.rank, "id": f"{note.rank}.{number}"}
        yield {"ph": "b", "ts": at(flight.begin), **common, "args": {"bytes": flight.bytes}}
        yield {"ph": "e", "ts": at(flight.end), **common}
