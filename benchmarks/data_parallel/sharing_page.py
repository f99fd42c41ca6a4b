"""The tables of ranks that share a GPU: what was measured, and how a step's time adds up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from harness.results import Record
from harness.tables import environment, markdown, ms
from problems import PROBLEMS
from sharing import APART, MURAL

KINDS = ("sharing",)
MEASURED = (
    "model, ranks × images",
    "kernels of a rank, alone",
    "queued, alone",
    "step, alone",
    "mural on one rank, alone",
    "all at once, apart",
    "mural",
    "gradients by themselves",
    "a rank waits",
    "messages + sums of a rank, MiB",
)
EXPLAINED = (
    "model, ranks",
    "mural: step",
    "÷ one process",
    "kernels of the whole batch",
    "+ smaller batches",
    "+ the host queues",
    "+ turns on the GPU",
    "+ mural's own work",
    "+ messages",
)


@dataclass(frozen=True)
class Parts:
    """Seconds that add up to a step of mural on some ranks of one GPU.

    kernels of the whole batch in one process
    + what its parts' kernels take longer, one after the other
    + what a rank alone takes longer than all these kernels: the host cannot queue them as fast as the GPU runs them
    + what ranks without messages take longer when they run at the same time
    + what mural on one rank takes longer than plain torch
    + the rest, which is there with messages alone
    """

    kernels: float
    smaller: float
    host: float
    turns: float
    own: float
    messages: float


def line(record: Record) -> str:
    """A measurement in one line, for the terminal."""
    ways = record["seconds"] if "seconds" in record else record["parts"]["1"]["seconds"]
    return f"{record['name']}: " + ", ".join(f"{key} {ms(seconds)} ms" for key, seconds in ways.items())


def text_of(records: Sequence[Record]) -> str:
    """Where the numbers come from, and the tables of what is there."""
    found = {r["name"]: r for r in records if r["kind"] in KINDS}
    failed = [r for r in records if r["kind"] == "failure" and r["name"] not in found]
    pairs = [(found[f"sharing/{model}/1"], own) for model in PROBLEMS for own in several(found.values(), model)]
    notes = [f"{r['name']}: {r['error'].splitlines()[-1]}" for r in failed]
    if not pairs:
        return "\n\n".join([environment(records), *notes])
    tables = [
        "What was measured, in ms:",
        markdown(MEASURED, [row for one in wholes(pairs) for row in measured_rows(one, pairs)]),
        "How the step of mural adds up, in ms:",
        markdown(EXPLAINED, [explained_row(one, own) for one, own in pairs]),
    ]
    return "\n\n".join([environment(records), *tables, *notes])


def several(records: Iterable[Record], model: str) -> list[Record]:
    """The records of a model on several ranks, few first, if there is one of a single rank to compare with."""
    mine = sorted((r for r in records if r["model"] == model), key=lambda r: r["ranks"])
    return mine[1:] if mine and mine[0]["ranks"] == 1 else []


def wholes(pairs: Sequence[tuple[Record, Record]]) -> list[Record]:
    """The records of single ranks, once each."""
    return list({one["name"]: one for one, _ in pairs}.values())


def measured_rows(one: Record, pairs: Sequence[tuple[Record, Record]]) -> list[list[str]]:
    """One row for one process with the whole batch, and one for each number of ranks."""
    rows = [alone_cells(one, 1) + ["–"] * 5]
    for _, own in (pair for pair in pairs if pair[0] is one):
        waited = statistics.mean(rank["communication"] + rank["idle"] for rank in own["waits"])
        counted = f"{own['messages']} + {own['sums']}, {own['bytes'] / 2**20:.0f}"
        ways = [ms(own["seconds"][way]) for way in (APART, MURAL)]
        rows.append([*alone_cells(one, own["ranks"]), *ways, ms(own["summing"]), ms([waited]), counted])
    return rows


def alone_cells(one: Record, ranks: int) -> list[str]:
    """What the only process needs for one rank's part of the batch."""
    part = one["parts"][str(ranks)]
    cells = [ms([part["kernels"][APART]]), ms(part["queued"][APART]), *(ms(part["seconds"][w]) for w in (APART, MURAL))]
    return [f"{one['model']}, {ranks} × {part['images']}", *cells]


def parts_of(one: Record, own: Record) -> Parts:
    """How a step on several ranks adds up."""
    n, whole, part = own["ranks"], one["parts"]["1"], one["parts"][str(own["ranks"])]
    kernels, all_kernels = whole["kernels"][APART], n * part["kernels"][APART]
    alone, by_mural = (statistics.median(part["seconds"][way]) for way in (APART, MURAL))
    apart, step = (statistics.median(own["seconds"][way]) for way in (APART, MURAL))
    least, python = max(alone, all_kernels), by_mural - alone
    return Parts(
        kernels=kernels,
        smaller=all_kernels - kernels,
        host=least - all_kernels,
        turns=apart - least,
        own=python,
        messages=step - apart - python,
    )


def explained_row(one: Record, own: Record) -> list[str]:
    """A step on several ranks, by what adds to it."""
    step = statistics.median(own["seconds"][MURAL])
    single = statistics.median(one["parts"]["1"]["seconds"][APART])
    cells = [f"{1000 * seconds:.1f}" for seconds in astuple(parts_of(one, own))]
    return [f"{own['model']}, {own['ranks']}", ms([step]), f"{step / single:.2f}", *cells]
