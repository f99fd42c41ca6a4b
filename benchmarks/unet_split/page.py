"""The page: tables from results/*.json between the marks of README.md, and the figure beside them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import figures
import published
from harness.results import Record, read
from harness.tables import NONE, environment, gib, markdown, place, ratio
from nets import NETS
from predictions import Forecasts, load

OPTIMUM = "optimum"
COLUMNS = (published.SEQUENTIAL, published.NAIVE, published.AWARE)
MORE_SIDES = (2304, 3072, 4096, 5120, 6144)


class Results:
    """What was measured, by U-Net, way and side, beside what was predicted."""

    def __init__(self, records: Iterable[Record], forecasts: Forecasts, about: Record, before: Record) -> None:
        self.records, self.forecasts, self.cap = list(records), forecasts, about["cap"]
        self.goals: dict[str, Any] = about["goals"]
        self.first_goals: dict[str, Any] = before["goals"]

    def of(self, kind: str, net: str, way: str) -> list[Record]:
        """The records of a kind about a way."""
        return [r for r in self.records if (r["kind"], r.get("net"), r.get("way")) == (kind, net, way)]

    def at(self, net: str, way: str, side: int) -> Record | None:
        """What was measured there."""
        return next((r for r in self.of("measure", net, way) if r["side"] == side), None)

    def fits(self, net: str, way: str) -> int | None:
        """The largest side that was seen to fit."""
        return max((r["side"] for r in self.of("measure", net, way)), default=None)

    def fails(self, net: str, way: str) -> int | None:
        """The smallest side that was seen to run out of memory."""
        found = (r["side"] for r in self.of("failure", net, way) if r["why"] == "memory")
        return min(found, default=None)

    def seconds(self, net: str, way: str, side: int) -> float | None:
        """The median of an image."""
        found = self.at(net, way, side)
        return statistics.median(found["seconds"]) if found and found["seconds"] else None

    def predicted(self, net: str, way: str, side: int) -> float:
        """The bytes of the rank that needs most."""
        return self.forecasts[net][way].peak(side)

    def mark(self, net: str, way: str, side: int) -> str:
        """A star where messages were staged through host memory."""
        found = self.at(net, way, side) or {}
        about = self.of("divided", net, way)
        words = found.get("messages", about[0]["messages"] if about else "")
        return "*" if "staged through pinned memory" in words and "CUDA IPC (" not in words else ""

    def slowdown(self, net: str, way: str, side: int) -> float | None:
        """The time of an image over that on one rank."""
        mine, alone = self.seconds(net, way, side), self.seconds(net, published.SEQUENTIAL, side)
        return mine / alone if mine and alone else None


# ----------------------------------------------------------------------------------------------------------- tables


def cell(results: Results, net: str, way: str, side: int) -> str:
    """Seconds of an image, and the largest rank's peak."""
    found, fails = results.at(net, way, side), results.fails(net, way)
    if found is not None:
        took = results.seconds(net, way, side)
        return f"{took:.3f} · {gib(found['allocated'])}" if took else gib(found["allocated"])
    return "OOM" if fails is not None and side >= fails else NONE


def side_table(results: Results, net: str) -> str:
    """Figure 9: the published columns beside ours, and slowdowns."""
    sides = [s for s in (*published.SIDES, *MORE_SIDES) if any(results.at(net, way, s) for way in COLUMNS)]
    if not sides:
        return ""
    beyond = next((s for s in (*published.SIDES, *MORE_SIDES) if s > max(sides)), None)
    head = ["side", *(f"{way}, theirs" for way in COLUMNS), *(f"{way}, ours" for way in COLUMNS)]
    head += [f"{way} ÷ sequential, theirs · ours" for way in COLUMNS[1:]]
    rows: list[list[str]] = []
    for side in [*sides, *([beyond] if beyond else [])]:
        theirs = [published.seconds(way, side) for way in COLUMNS]
        slower: list[str] = []
        for way in COLUMNS[1:]:
            alone = published.SECONDS[published.SEQUENTIAL].get(side)
            cited = published.SECONDS[way].get(side)
            slower.append(
                f"{ratio(cited / alone if cited and alone else None)} · {ratio(results.slowdown(net, way, side))}"
            )
        rows.append([f"{side}²", *theirs, *(cell(results, net, way, side) for way in COLUMNS), *slower])
    return markdown(head, rows)


def way_table(results: Results, net: str) -> str:
    """All ways: what was predicted to fit, what did, and what it took."""
    naive = results.fits(net, published.NAIVE)
    rows: list[list[str]] = []
    for name, forecast in results.forecasts[net].items():
        fits, fails = results.fits(net, name), results.fails(net, name)
        peak = results.at(net, name, fits) if fits else None
        took = results.seconds(net, name, 512)
        rows.append(
            [
                name,
                forecast.way.words,
                str(forecast.way.ranks),
                str(forecast.largest(results.cap)),
                str(fits or NONE),
                str(fails or NONE),
                f"{gib(peak['allocated'])} · {gib(results.predicted(net, name, peak['side']))}" if peak else NONE,
                ratio(fits / naive if fits and naive else None),
                f"{took:.3f}{results.mark(net, name, 512)}" if took else NONE,
                ratio(results.slowdown(net, name, 512)),
                there(results, net, name, fits),
            ]
        )
    head = ["way", "what it is", "ranks", "predicted largest side", "fits", "fails",
            "peak there, GiB: measured · predicted", "side ÷ naive", "512², s an image", "÷ sequential",
            "at the side that fits, s an image"]  # fmt: skip
    return markdown(head, rows)


def there(results: Results, net: str, way: str, side: int | None) -> str:
    """Seconds of the largest image that fits."""
    found = results.at(net, way, side) if side else None
    if found is None or not found["seconds"]:
        return NONE
    return f"{statistics.median(found['seconds']):.2f}{results.mark(net, way, found['side'])}"


def goal_text(results: Results, net: str) -> str:
    """How far layer cuts come towards the optimum, and the other ways towards twice the naive side."""
    goal = results.goals[net]
    naive, aware = results.fits(net, published.NAIVE), results.fits(net, published.AWARE)
    if not naive or not aware:
        return ""
    most = max((results.fits(net, way) or 0, way) for way in results.forecasts[net])
    best = results.fits(net, OPTIMUM)
    ran = [f"Those cuts themselves ran up to {best}²: {aware}² is {100 * aware / best:.0f}%."] if best else []
    first = results.first_goals[net]["optimum"]
    sentences = [
        f"The best cuts over the graph's cut points are predicted to reach {goal['optimum']}²; stages balanced by",
        f"memory reached {aware}², {100 * aware / goal['optimum']:.0f}% of it, and {aware / naive:.2f} times the side",
        "of naive cuts.",
        *ran,
        "The model as it was before these measurements corrected it put the optimum at",
        f"{first}²: of that, {aware}² is {100 * aware / first:.0f}%. (By what is held alone, the heaviest naive stage",
        f"has {100 * goal['share']:.0f}% of all memory: no cuts can gain more than √(8 × share) = {goal['bound']:.2f}",
        f"in side, the best of this graph {goal['gain']:.2f}; what passes by inside a stage, gradients and workspaces,",
        f"takes part of that.) The largest image that was run is {most[0]}², {most[0] / naive:.2f} times the side of",
        f"naive cuts: {most[1]}.",
    ]
    return " ".join(sentences)


def late_text(results: Results, net: str) -> str:
    """Sides that came to no end in time, if there are some."""
    late = [r for r in results.records if r["kind"] == "failure" and r.get("net") == net and r["why"] == "late"]
    found = [f"{r['way']} at {r['side']}²" for r in late if results.at(net, r["way"], r["side"]) is None]
    return f"Not done within a minute, and so neither «fits» nor «fails»: {', '.join(found)}." if found else ""


def accuracy_text(results: Results) -> str:
    """How far predictions were off, over all sides of 512 and more: as made before each run, and by today's model."""
    found = [
        r
        for r in results.records
        if r["kind"] == "measure" and r["side"] >= 512 and r["way"] in results.forecasts.get(r["net"], {})
    ]
    before = [r["predicted"] / r["allocated"] - 1 for r in found]
    today = [results.predicted(r["net"], r["way"], r["side"]) / r["allocated"] - 1 for r in found]
    sentences = [
        f"Predicted against measured peak of the largest rank, {len(found)} cases of 512² and more: as it was",
        f"predicted before the run, {spread(before)}; by the model as it is now, {spread(today)}. The second number is",
        "no test of the model where the same cases corrected it.",
    ]
    return " ".join(sentences)


def messages_text(results: Results) -> str:
    """What messages cost, as ranks timed them when a team started, and which way they took then."""
    words = [r["messages"] for r in results.records if r["kind"] == "divided" and "CUDA IPC (" in r["messages"]]
    if not words:
        return ""
    least, most = (f(words, key=smallest_message) for f in (min, max))
    return (
        "How messages travelled, as every team decides by a trial when it starts: "
        f"«{most}» in the slowest trial, «{least}» in the fastest."
    )


def smallest_message(words: str) -> int:
    """The microseconds of the smallest message by IPC.

    >>> smallest_message("GPU tensors through CUDA IPC (64 KiB in 2305 µs by IPC, 723 pinned)")
    2305
    """
    return int(words.split(" µs by IPC")[0].split()[-1])


def spread(off: list[float]) -> str:
    """The mean and the 90th percentile of how far numbers are off.

    >>> spread([0.1, -0.1, 0.2])
    '13.3% off on average, 10.0% at the 90th percentile'
    """
    sizes = sorted(abs(value) for value in off)
    tail = sizes[int(0.9 * (len(sizes) - 1))]
    return f"{100 * statistics.mean(sizes):.1f}% off on average, {100 * tail:.1f}% at the 90th percentile"


def agreement_table(results: Results) -> str:
    """Stages beside one device, in float64."""
    rows = [
        [r["name"], *(f"{r[key]:.0e}" for key in ("loss", "gradients", "state"))]
        for r in results.records
        if r["kind"] == "agrees"
    ]
    return markdown(["plan", "loss", "gradients", "buffers and weights after three steps"], rows)


def write(folder: Path) -> None:
    """Rewrite the page and its figure from the results that are there."""
    source, guess = folder / "results" / "gpu.json", folder / "results" / "predicted.json"
    if not source.is_file():
        return
    about, before = (json.loads(path.read_text()) for path in (guess, folder / "results" / "predicted_before.json"))
    records = read(source)
    results = Results(records, load(guess), about, before)
    figures.draw(results, folder / "figures" / "ranks.svg")
    parts = [environment(records), accuracy_text(results), messages_text(results)]
    for net in results.forecasts:
        parts += [f"### {NETS[net].words[0].upper()}{NETS[net].words[1:]}", side_table(results, net)]
        parts += [way_table(results, net), late_text(results, net), goal_text(results, net)]
    parts += ["### The same result", agreement_table(results)]
    place(folder / "README.md", "results", "\n\n".join(part for part in parts if part))
