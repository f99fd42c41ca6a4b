"""Accounts of steps: every second of a step is compute, communication, idle time or waiting for images."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural.comm.trace import Flight, Post, Trace, Wait
from mural.profile import Notes, StepAccount, account, chrome_trace

POST: Post = ("", 7)


def notes_of(posts: list[float], waits: list[tuple[float, float]], shifts: list[float]) -> list[Notes]:
    """Ranks that meet once, in a step of ten seconds; times are those of the first rank's clock."""
    found: list[Notes] = []
    for rank, (post, (begin, end), shift) in enumerate(zip(posts, waits, shifts, strict=True)):
        needs = tuple((other, POST) for other in range(len(posts)) if other != rank)
        wait = Wait("halo", begin - shift, end - shift, needs)
        trace = Trace({POST: post - shift}, [wait], [Flight("halo", post - shift, end - shift, 64)])
        found.append(Notes(rank, (StepAccount(1, 0.0 - shift, 10.0 - shift, 0.0),), trace, shift=shift))
    return found


@pytest.mark.parametrize(
    ("late", "idle", "travels"),
    [
        (0.5, 0.0, 3.0),  # the peer had posted before: all of the wait is communication
        (3.0, 2.0, 1.0),  # it came in the middle
        (6.0, 3.0, 0.0),  # nobody noted a wait this long: what was waited for is still idle time
    ],
)
def test_a_wait_is_idle_until_the_peer_is_there(late: float, idle: float, travels: float) -> None:
    first, _ = account(notes_of([1.0, late], [(1.0, 4.0), (late, late + 0.5)], [0.0, 0.0]))
    assert (first.idle, first.communication["halo"], first.compute) == (idle, travels, 7.0)


moments = st.floats(0, 4)


@given(st.lists(st.tuples(moments, moments, st.floats(-5, 5)), min_size=2, max_size=4))
def test_shares_add_up_and_clocks_do_not_matter(ranks: list[tuple[float, float, float]]) -> None:
    posts = [post for post, _, _ in ranks]
    waits = [(post, post + length) for post, length, _ in ranks]
    shifted = account(notes_of(posts, waits, [shift for _, _, shift in ranks]))
    plain = account(notes_of(posts, waits, [0.0] * len(ranks)))
    for a, b in zip(shifted, plain, strict=True):
        assert a.compute + a.communicating + a.idle + a.data == pytest.approx(10.0)
        assert (a.compute, a.communicating, a.idle) == pytest.approx((b.compute, b.communicating, b.idle))
        assert min(a.compute, a.communicating, a.idle) >= -1e-9


def test_a_wait_counts_in_the_step_that_it_lies_in() -> None:
    steps = (StepAccount(1, 0.0, 2.0, 0.5), StepAccount(2, 2.0, 5.0, 0.0))
    first, second = account([Notes(0, steps, Trace(waits=[Wait("stages", 1.0, 3.0), Wait("loss", 4.0, 4.5)]))])
    assert first.communication == {"stages": 1.0}
    assert first.compute == 0.5
    assert second.communication == {"stages": 1.0, "loss": 0.5}
    assert second.compute == 1.5


def test_the_trace_nests_and_begins_at_zero() -> None:
    notes = notes_of([1.0, 3.0], [(1.0, 4.0), (3.0, 3.5)], [0.0, 2.0])
    events = json.loads(chrome_trace(notes))["traceEvents"]
    steps = {e["pid"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "step"}
    assert steps == {0: (0.0, 1e7), 1: (0.0, 1e7)}
    for event in events:
        if event["ph"] == "X":
            begin, end = steps[event["pid"]]
            assert begin <= event["ts"]
            assert event["ts"] + event["dur"] <= end
    flights = [(e["ph"], e["id"]) for e in events if e.get("cat") == "messages"]
    assert flights == [("b", "0.0"), ("e", "0.0"), ("b", "1.0"), ("e", "1.0")]
