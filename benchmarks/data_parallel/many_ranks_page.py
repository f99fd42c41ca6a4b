"""The tables of a machine with a core for each rank: training efficiency, norms, and one to four processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import efficiency
import norms
import published
from harness.results import Record
from harness.tables import NONE, environment, markdown, ms
from problems import PROBLEMS

KINDS = ("efficiency", "norms", "processes")


def line(record: Record) -> str:
    """A measurement in one line, for the terminal."""
    found = record["seconds"]
    each = found.items() if isinstance(found, dict) else [("step", found)]
    return f"{record['name']}: " + ", ".join(f"{key} {ms(seconds)} ms" for key, seconds in each)


def text_of(records: Sequence[Record]) -> str:
    """Where the numbers come from, and the tables of what is there."""
    parts = [environment(records)]
    for kind, text in zip(KINDS, (efficiency_text, norms_text, processes_text), strict=True):
        found = {r["name"]: r for r in records if r["kind"] == kind}
        if found:
            parts += text(list(found.values()))
    done = {r["name"] for r in records if r["kind"] in KINDS}
    failed = [r for r in records if r["kind"] == "failure" and r["name"] not in done]
    return "\n\n".join([*parts, *(f"{r['name']}: {r['error'].splitlines()[-1]}" for r in failed)])


def median(record: Record, key: str) -> float | None:
    """The median step of a variant, where there is one."""
    return statistics.median(record["seconds"][key]) if key in record["seconds"] else None


def efficiency_text(records: Sequence[Record]) -> list[str]:
    """For each model and number of ranks: the time of one rank's step over that of each way's."""
    names = (efficiency.APART, *efficiency.ALGORITHMS)
    alone = {r["model"]: median(r, efficiency.APART) for r in records if r["ranks"] == 1}
    rows: list[list[str]] = []
    for record in sorted(records, key=lambda r: (list(PROBLEMS).index(r["model"]), r["ranks"])):
        one, cells = alone.get(record["model"]), list[str]()
        for name in names:
            step = median(record, name)
            share = f"{100 * one / step:.0f}% · " if one and step and record["ranks"] > 1 else ""
            cells.append(f"{share}{ms([step])}" if step else NONE)
        gain = [median(record, name) for name in ("parameter-server", "ring")]
        ratio = f"{gain[0] / gain[1]:.2f}" if gain[0] and gain[1] else NONE
        rows.append([efficiency.words(record["model"]), str(record["ranks"]), *cells, ratio])
    return [
        "Training efficiency (one rank's step ÷ the step), and the step in ms:",
        markdown(["model", "ranks", *names, "server ÷ ring"], rows),
    ]


def norms_text(records: Sequence[Record]) -> list[str]:
    """For each model and number of ranks: the step with each norm, over that without, and what is exchanged."""
    rows: list[list[str]] = []
    for record in sorted(records, key=lambda r: (list(PROBLEMS).index(r["model"]), r["ranks"])):
        cells: list[str] = []
        for name in norms.VARIANTS:
            pairs = zip(record["seconds"][name], record["seconds"][norms.VARIANTS[0]], strict=True)
            ratio = "" if name == norms.VARIANTS[0] else f" ({statistics.median(a / b for a, b in pairs):.2f})"
            cells.append(f"{ms(record['seconds'][name])}{ratio} · {record['exchanges'][name]}")
        model = f"{efficiency.words(record['model'])}; {record['norms']} norms"
        rows.append([model, str(record["ranks"]), *cells])
    return [
        "Step in ms (÷ that without norms, of the same round) · messages and sums of a rank in a step:",
        markdown(["model", "ranks", *norms.VARIANTS], rows),
    ]


def processes_text(records: Sequence[Record]) -> list[str]:
    """One to four processes with 200 images each: 4,000 iterations, in the document and here."""
    found = {r["ranks"]: published.ITERATIONS * statistics.median(r["seconds"]) for r in records}
    first, theirs = min(found), published.SECONDS
    rows = [
        [str(n), f"{theirs[n]:.1f}", f"{theirs[n] / theirs[1]:.2f}", f"{took:.1f}", f"{took / found[first]:.2f}"]
        for n, took in sorted(found.items())
    ]
    head = ["processes", "document: s for 4,000 iterations, one GPU", "÷ 1", "mural: s for 4,000, one core each"]
    return ["4,000 times the median iteration:", markdown([*head, f"÷ {first}"], rows)]
