"""A session of measurements: runs cases on teams, writes each result at once, and stops when the time is up."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from harness.case import GIB, Case
from harness.results import Log, Record
from harness.search import HEADROOM, floor_to, next_size
from harness.team import CaseFailed, Pool, Team

Answers = list[dict[str, Any]]
OVERTIME = 20.0
"""Seconds that a case may go on when the time is up."""
ROOMY = 0.9
"""The share of the cap below which times are measured: at the cap, the allocator itself takes time."""


class Session:
    """Asks teams for measurements. A team serves case after case until one fails, or other ranks are wanted."""

    def __init__(self, log: Log, pool: Pool) -> None:
        self.log, self.pool = log, pool
        self.stack = ExitStack()
        self.held: tuple[Team, int, int | None] | None = None

    def team(self, ranks: int, cap: int | None) -> Team:
        """The team at hand if it has that many ranks under that cap, else a new one."""
        if self.held is None or self.held[1:] != (ranks, cap):
            self.drop()
            self.held = self.stack.enter_context(self.pool.team(ranks, cap)), ranks, cap
            self.log.versions(self.held[0].facts)
        return self.held[0]

    def drop(self) -> None:
        """End the team at hand."""
        self.held = None
        self.stack.close()

    def ask(
        self, do: str, case: Case, cap: int | None, *, quiet: bool = False, longest: float = 120.0, **given: Any
    ) -> Answers | None:
        """The answers of all ranks; None, and a record of why, if the case failed. Quiet: while nothing else starts."""
        try:
            team = self.team(case.ranks, cap)
            if quiet:
                self.pool.settle()
            limit = min(longest, max(0.0, self.log.left) + OVERTIME)
            return team.ask(do, limit=limit, case=case.encode(), **given)
        except CaseFailed as failure:
            self.drop()
            failure.note(self.log, case.title, name=do, case=case.encode(), cap=cap)
            return None

    def measure(
        self, case: Case, cap: int | None, repeats: int = 3, budget: float = 3.0, quiet: bool = False
    ) -> Record | None:
        """The peaks and times of a case, known or measured now."""
        known = self.log.find("measure", case=case.encode(), cap=cap)
        if known is not None:
            return known
        answers = self.ask("measure", case, cap, quiet=quiet, repeats=repeats, budget=budget)
        if answers is None:
            return None
        record = self.log.write("measure", case=case.encode(), cap=cap, **merged(answers, self.log.machine))
        times = f", {min(record['seconds']):.3f} s" if record["seconds"] else ""
        self.log.say(f"{case.title}: {record['allocated'] / GIB:.2f} GiB a rank{times}")
        return record

    def busy(self, case: Case, cap: int | None, repeats: int = 3, budget: float = 2.0) -> Record | None:
        """The time of each rank's own part of a step, with the others idle."""
        known = self.log.find("busy", case=case.encode(), cap=cap)
        if known is not None:
            return known
        answers = self.ask("busy", case, cap, repeats=repeats, budget=budget)
        if answers is None:
            return None
        seconds = [sorted(a["seconds"])[len(a["seconds"]) // 2] for a in answers]
        rest = {"transfers": answers[0]["transfers"], "losses": answers[0]["losses"]}
        return self.log.write("busy", case=case.encode(), cap=cap, seconds=seconds, **rest)

    def limit(
        self,
        case: Case,
        cap: int,
        *,
        step: int,
        guess: float,
        repeats: int = 0,
        need: float = 45.0,
        busy: bool = False,
    ) -> Record | None:
        """The largest extent at which a case fits under the cap; None if the time was up before it was known."""
        about = case.sized(0).encode()
        if (known := self.log.find("limit", case=about, cap=cap)) is not None:
            return known
        peaks, failed = self.seen(case, cap)
        why = ""
        dims = len(case.extents)
        while (size := next_size(peaks, failed, guess=guess, step=step, cap=cap, dims=dims)) is not None:
            if self.log.left < need:
                self.log.write("skipped", name="limit", case=about, cap=cap, tried=sorted(peaks), failed=sorted(failed))
                self.log.say(f"{case.title}: no time left for {size}; {sorted(peaks)} fit")
                return None
            record = self.measure(case.sized(size), cap, repeats=repeats)
            if record is not None:
                peaks[size] = record["allocated"]
                # The recording needs room of its own, too.
                if busy and record["reserved"] < ROOMY * cap:
                    self.busy(case.sized(size), cap)
                continue
            failed.add(size)
            last = self.log.find("failure", case=case.sized(size).encode(), cap=cap) or {}
            why = f"{last.get('why')}: {last.get('message')}"
            if last.get("why") == "late" or (not peaks and last.get("why") != "memory"):
                return None  # too slow, or it does not run at all: not a matter of size
        largest = max(peaks, default=0)
        self.log.say(f"{case.sized(largest).title} is the largest")
        return self.log.write("limit", case=about, cap=cap, largest=largest, step=step, above=why)

    def seen(self, case: Case, cap: int) -> tuple[dict[int, float], set[int]]:
        """The extents of this case that were tried: peaks of those that fit, and those that did not."""
        peaks: dict[int, float] = {}
        failed: set[int] = set()
        for record in self.log.records:
            if record.get("cap") != cap or record["kind"] not in ("measure", "failure"):
                continue
            size = record["case"]["extents"][0]
            if record["case"] != case.sized(size).encode():
                continue
            if record["kind"] == "measure":
                peaks[size] = record["allocated"]
            elif record["name"] == "measure" and record["why"] == "memory":
                failed.add(size)
        return peaks, failed


def guess_for(ranks: int, single: int | None, default: int, step: int, dims: int) -> int:
    """An extent that surely fits on several ranks: theirs together, less a twentieth, at the largest of one rank.

    >>> guess_for(4, 1536, 1024, 256, 2), guess_for(1, None, 1024, 256, 2)
    (2816, 1024)
    """
    return default if single is None else floor_to(HEADROOM * 0.95 * single * ranks ** (1 / dims), step)


def merged(answers: Answers, machine: dict[str, Any]) -> dict[str, Any]:
    """What the ranks measured together: the largest peak, the slowest time of each step, memory of the device."""
    steps = zip(*(a["seconds"] for a in answers), strict=True)
    used, held = answers[0]["device_now"], sum(a["reserved_now"] for a in answers)
    # Contexts and code: what is used on the device beyond the allocators, shared out over the ranks.
    beside = max(0, used - held - machine["device_used_before"]) // len(answers)
    return {
        "allocated": max(a["allocated"] for a in answers),
        "allocated_each": [a["allocated"] for a in answers],
        "reserved": max(a["reserved"] for a in answers),
        "device": max(a["reserved"] for a in answers) + beside,
        "replicated": answers[0]["replicated"],
        "loss": answers[0]["loss"],
        "messages": answers[0]["messages"],
        "seconds": [max(ranks) for ranks in steps],
    }
