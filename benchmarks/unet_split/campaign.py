"""The measurements: for each way, the sides of the table, and then the largest side that fits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from harness.case import GIB
from harness.results import Log, Record
from harness.search import HEADROOM as FILLED
from harness.search import next_size
from harness.team import CaseFailed, Pool, Team
from ways import HEADROOM, Forecast

from mural.plans import Plan

Answers = list[dict[str, Any]]
FEW_SIDES = (512, 2048, 2304, 4096, 5120)
"""Where the ways that were not published are measured; 2304 and 5120 are twice what naive cuts reach, or more."""
LIMIT = 60.0
"""Seconds for the steps of one side."""
NOTE = "the allocator came to its limit"
"""Stands in what a rank says of a step."""
STACK_LINES = 60
"""What is printed of a rank that did not answer."""


class Campaign:
    """Asks teams of ranks, and writes each result at once. A team serves until its ranks run out of memory."""

    def __init__(
        self, log: Log, pool: Pool, cap: int, step: int, sides: Sequence[int], wanted: Sequence[int] = ()
    ) -> None:
        self.log, self.pool, self.cap, self.step, self.sides, self.wanted = log, pool, cap, step, sides, wanted
        self.stack = ExitStack()
        self.held: tuple[Team, int, Any] | None = None
        self.messages = ""

    def team(self, ranks: int) -> Team:
        """The team at hand if it has that many ranks, else a new one."""
        if self.held is None or self.held[1] != ranks:
            self.drop()
            team = self.stack.enter_context(self.pool.team(ranks, self.cap))
            self.held = team, ranks, None
            self.log.versions(team.facts)
        return self.held[0]

    def drop(self) -> None:
        """End the team at hand."""
        self.held = None
        self.stack.close()

    def divided(self, net: str, forecast: Forecast) -> Team:
        """A team whose ranks hold their parts of the model."""
        team = self.team(forecast.way.ranks)
        about = (net, forecast.way.name)
        if self.held is None or self.held[2] != about:
            plan = None if forecast.plan is None else asdict(forecast.plan)
            answers = team.ask("divide", net=net, plan=plan, aim=forecast.aim)
            self.held = team, forecast.way.ranks, about
            self.messages = answers[0]["messages"]
            if self.log.find("divided", net=net, way=forecast.way.name) is None:
                first = answers[0]
                self.log.write(
                    "divided", net=net, way=forecast.way.name, sites=first["sites"], messages=first["messages"],
                    parameters=[a["parameters"] for a in answers],
                )  # fmt: skip
        return team

    def measure(self, net: str, forecast: Forecast, side: int, repeats: int, budget: float) -> Record | None:
        """Peaks and times of images of that side, or None and a record of the failure."""
        way = forecast.way
        about: dict[str, Any] = {"net": net, "way": way.name, "side": side, "cap": self.cap}
        if (known := self.log.find("measure", **about)) is not None:
            return known
        team: Team | None = None
        try:
            team = self.divided(net, forecast)
            limit = min(LIMIT, max(0.0, self.log.left) + 15.0)
            answers = team.ask("steps", limit=limit, side=side, images=way.images, repeats=repeats, budget=budget)
        except CaseFailed as failure:
            self.drop()
            late = notes_of(team) if failure.kind == "late" else []
            failure.message = "; ".join([failure.message, *late])
            failure.note(self.log, f"{net}, {way.name}, {side}²", **about)
            if late:
                self.show_stacks(team)
            return None
        found = merged(answers) | {"messages": self.messages}
        record = self.log.write("measure", **about, predicted=forecast.peak(side), **found)
        times = f", {min(record['seconds']):.3f} s an image" if record["seconds"] else ""
        peaks = f"{record['allocated'] / GIB:.2f} GiB of {record['predicted'] / GIB:.2f} predicted"
        self.log.say(f"{net}, {way.name}, {side}²: {peaks}{times}")
        return record

    def show_stacks(self, team: Team | None) -> None:
        """Print what the ranks of a team said before it was ended: a rank that is late prints where it is."""
        for rank, worker in enumerate(team.members if team else ()):
            lines = worker.log.read_text(errors="replace").splitlines()
            print(f"rank {rank}:", *lines[-STACK_LINES:], sep="\n  ", flush=True)

    def run(self, net: str, forecast: Forecast, repeats: int, budget: float, need: float, search: bool) -> None:
        """The table's sides as far as they are predicted to fit, and then the search for the largest."""
        name = forecast.way.name
        if self.log.find("limit", net=net, way=name, cap=self.cap, sure=True) is not None or self.log.left < need:
            return
        reach = forecast.largest(self.cap)
        some = self.sides if forecast.way.full or len(self.sides) < len(FEW_SIDES) else FEW_SIDES
        for side in (s for s in self.wanted or some if s <= reach):
            if self.log.left < need or self.measure(net, forecast, side, repeats, budget) is None:
                break
        peaks, failed, why = self.seen(net, name)
        while search and len(failed) < 3:
            size = next_size(peaks, failed, guess=reach, step=self.step, cap=self.cap * HEADROOM / FILLED, dims=2)
            if size is None:
                break
            if self.log.left < need:
                self.log.say(f"{net}, {name}: no time left for {size}²; {sorted(peaks)} fit")
                return
            record = self.measure(net, forecast, size, repeats=1, budget=0.0)
            peaks, failed, why = self.seen(net, name)
            if record is None and why not in ("", "memory", "late"):
                break  # not a matter of size
        if not search:
            return
        largest = max(peaks, default=0)
        sure = self.log.find("failure", net=net, way=name, side=largest + self.step, cap=self.cap, why="memory")
        self.log.write("limit", net=net, way=name, cap=self.cap, largest=largest, step=self.step, sure=sure is not None,
                       predicted=reach)  # fmt: skip
        self.log.say(f"{net}, {name}: {largest}² is the largest ({reach}² predicted)")

    def seen(self, net: str, way: str) -> tuple[dict[int, float], set[int], str]:
        """Peaks of the sides that fit, the sides that did not (or came to no end), and why the last one failed."""
        mine = [r for r in self.log.records if (r.get("net"), r.get("way"), r.get("cap")) == (net, way, self.cap)]
        peaks = {r["side"]: float(r["allocated"]) for r in mine if r["kind"] == "measure"}
        failures = [r for r in mine if r["kind"] == "failure"]
        failed = {r["side"] for r in failures if r["why"] in ("memory", "late")} - set(peaks)
        return peaks, failed, failures[-1]["why"] if failures else ""

    def agree(self, plans: dict[str, Plan], side: int) -> None:
        """How far small models in stages are from one device."""
        for name, plan in sorted(plans.items(), key=lambda item: item[1].devices):
            try:
                answers = self.team(plan.devices).ask("agrees", plan=asdict(plan), side=side)
            except CaseFailed as failure:
                self.drop()
                failure.note(self.log, name, name="agrees", plan=name)
                continue
            found = {key: max(a[key] for a in answers) for key in answers[0]}
            self.log.write("agrees", name=name, device=self.log.facts.get("device"), **found)
            self.log.say(f"{name}: {found}")


def notes_of(team: Team | None) -> list[str]:
    """What each rank of a team last said of its steps."""
    found: list[str] = []
    for rank, worker in enumerate(team.members if team else ()):
        notes = [line for line in worker.log.read_text(errors="replace").splitlines() if NOTE in line]
        found.append(f"rank {rank}: {notes[-1] if notes else 'no step is done'}")
    return found


def merged(answers: Answers) -> dict[str, Any]:
    """What the ranks measured together: the largest peak and every rank's, the slowest time of each step."""
    steps = zip(*(a["seconds"] for a in answers), strict=True)
    return {
        "allocated": max(a["allocated"] for a in answers),
        "each": [a["allocated"] for a in answers],
        "reserved": max(a["reserved"] for a in answers),
        "retries": max(a["retries"] for a in answers),
        "loss": answers[0]["loss"],
        "seconds": [max(ranks) for ranks in steps],
    }
