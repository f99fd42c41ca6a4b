"""Rosters: who takes part in a round, whoever comes first, late, or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from mural.errors import PlanError
from mural.federated import Federation, Patience
from mural.federated.federation import check_alike, check_samples
from mural.federated.roster import ClinicTurn, Roster, RoundAttempt, store_at


def member(name: str, version: int = 0, form: str = "f") -> ClinicTurn:
    return ClinicTurn(name, version, "", form)


def test_all_who_come_are_on_it_in_one_order() -> None:
    store = HashStore()
    rosters = [Roster(store, Patience(expected=4, seconds=5)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: rosters[i].meet(RoundAttempt(), member(f"clinic {i}")), range(4)))
    assert len(set(found)) == 1
    assert {m.name for m in found[0] or ()} == {f"clinic {i}" for i in range(4)}


def test_who_comes_too_late_waits_for_the_next_turn() -> None:
    store = HashStore()
    first, late = (Roster(store, Patience(expected=2, quorum=1, seconds=0.1)) for _ in range(2))
    assert first.meet(RoundAttempt(), member("a")) == (member("a"),)  # nobody else came in time
    assert late.meet(RoundAttempt(), member("b")) is None
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(late.await_later, RoundAttempt())
        first.advance(RoundAttempt(1))
        assert waiting.result(5) == RoundAttempt(1)
        both = [pool.submit(r.meet, RoundAttempt(1), member(n, 1)) for r, n in ((first, "a"), (late, "b"))]
        assert {m.name for m in both[0].result(5) or ()} == {"a", "b"}
        assert both[0].result() == both[1].result()


def test_below_the_quorum_nobody_begins() -> None:
    store = HashStore()
    rosters = [Roster(store, Patience(expected=3, quorum=2, seconds=0.05)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rosters[0].meet, RoundAttempt(), member("a"))
        with pytest.raises(TimeoutError):
            first.result(0.5)
        second = pool.submit(rosters[1].meet, RoundAttempt(), member("b"))
        assert first.result(5) == second.result(5) == (member("a"), member("b"))


def test_who_leads_a_turn_that_the_others_left_behind_goes_on() -> None:
    """The leader waited for ever."""
    store = HashStore()
    behind, ahead = (Roster(store, Patience(expected=3, quorum=2, seconds=0.1)) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(behind.meet, RoundAttempt(0, 1), member("a"))
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        ahead.advance(RoundAttempt(1))
        assert waiting.result(5) is None
    assert behind.await_later(RoundAttempt(0, 1)) == RoundAttempt(1)


def test_turns_are_in_order() -> None:
    assert RoundAttempt(1) > RoundAttempt(0, 3) > RoundAttempt(0)
    roster = Roster(HashStore(), Patience(1))
    roster.advance(RoundAttempt(2))
    roster.advance(RoundAttempt(1, 5))
    assert roster.latest() == RoundAttempt(2)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(PlanError, match="quorum"):
        Federation("a", "127.0.0.1:1", Patience(expected=1, quorum=2))
    with pytest.raises(PlanError, match="set quorum to 3"):
        Federation("a", "127.0.0.1:1", Patience(expected=4, quorum=2), masked=True)
    with pytest.raises(PlanError, match="host:port"):
        store_at("somewhere", holds=False, timeout=1)
    with pytest.raises(PlanError, match="two clinics"):
        check_alike([member("a"), member("a")], "a")
    with pytest.raises(PlanError, match="other parameters than that of b"):
        check_alike([member("a"), member("b", form="g")], "a")
    with pytest.raises(PlanError, match=r"a has masked=False, but b masked=True: .* in every clinic, or in none"):
        check_alike([member("a"), replace(member("b"), masked=True), member("c")], "a")
    for samples in (-1, None, 2.5):
        with pytest.raises(PlanError, match="number of samples"):
            check_samples(samples)
