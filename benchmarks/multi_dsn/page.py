"""README.md's tables from results/gpu.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from harness.case import GIB
from harness.results import Record, read
from harness.tables import NONE, environment, markdown, place

from multi_dsn.ways import PUBLISHED_SIDE, SIDES, WAYS

TRAFFIC = ("", "codes, predicted", "counted", "weights, predicted", "counted")


def write(folder: Path) -> None:
    """Put the tables into the page."""
    records = read(folder / "results" / "gpu.json")
    found = {(r["way"], r["side"]): r for r in records if r["kind"] == "measure"}
    limits = {r["way"]: r for r in records if r["kind"] == "limit"}
    head = ["", *(f"{side}²" for side in SIDES)]
    memory = [[way.name, *(peak(found.get((way.name, side))) for side in SIDES)] for way in WAYS]
    busy = [[way.name, *(utilisation(found.get((way.name, side))) for side in SIDES)] for way in WAYS]
    speed = [[way.name, *(throughput(found.get((way.name, side))) for side in SIDES)] for way in WAYS]
    traffic = [[way.name, *sent(found.get((way.name, PUBLISHED_SIDE)))] for way in WAYS if way.ranks > 1]
    largest = [[way.name, f"{way.ranks}", *limit(limits.get(way.name))] for way in WAYS if way.searched]
    readme = folder / "README.md"
    place(readme, "memory", f"{environment(records)}\n\n{markdown(head, memory)}")
    place(readme, "utilisation", markdown(head, busy))
    place(readme, "throughput", markdown(head, speed))
    place(readme, "traffic", markdown(TRAFFIC, traffic))
    place(readme, "largest", markdown(["", "ranks", "GiB each", "largest side", "does not fit"], largest))


def peak(record: Record | None) -> str:
    """The memory of the rank that needs most."""
    return NONE if record is None else f"{max(record['reserved']) / GIB:.2f}"


def utilisation(record: Record | None) -> str:
    """The part of a step in which a rank's kernels run, mean over ranks."""
    if record is None:
        return NONE
    return f"{statistics.mean(record['computing']) / statistics.median(record['seconds']):.0%}"


def throughput(record: Record | None) -> str:
    """Images of all domains a second."""
    return NONE if record is None else f"{record['images'] / statistics.median(record['seconds']):.1f}"


def sent(record: Record | None) -> Sequence[str]:
    """Megabytes of all ranks in a step."""
    if record is None:
        return [NONE] * 4
    values = (record["predicted"]["codes"], sum(record["bytes"]), record["predicted"]["weights"], sum(record["added"]))
    return [f"{value / 1e6:.3f} MB" for value in values]


def limit(record: Record | None) -> Sequence[str]:
    """The cap, and the sides around the limit."""
    if record is None:
        return [NONE] * 3
    return [f"{record['cap'] / GIB:.1f}", f"{record['largest']}²", f"{record['failed']}²"]
