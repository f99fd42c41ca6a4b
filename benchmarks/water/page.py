"""README.md's tables from the files of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from context.summary import Scores
from harness.results import Record, read
from harness.tables import NONE, environment, markdown, place

from water.cases import WAYS, Part
from water.evaluation import THRESHOLDS, overlap
from water.world import SOURCE, TARGETS, TEST, VALIDATION

Runs = list[tuple[Part, Record]]
SECTIONS = {"gpu": ("windows", "domains"), "cpu": ("coarse windows", "coarse domains")}
"""The marks of the page for each file of results."""


def write(folder: Path) -> None:
    """Put the tables into the page, of each file of results that is there."""
    files = {name: folder / "results" / f"{name}.json" for name in SECTIONS}
    found = {name: read(file) for name, file in files.items() if file.is_file()}
    if not found:
        raise SystemExit("there are no results yet: run parts, and then `mural bench water --collect FILE.jsonl …`")
    for name, records in found.items():
        windows, domains = SECTIONS[name]
        text = f"{environment(records)}\n\n{windows_table(runs_of(records, 'windows'))}"
        place(folder / "README.md", windows, text)
        place(folder / "README.md", domains, domains_table(runs_of(records, "domains")))


def tables(records: Sequence[Record]) -> str:
    """Both tables."""
    return f"{windows_table(runs_of(records, 'windows'))}\n\n{domains_table(runs_of(records, 'domains'))}"


def runs_of(records: Iterable[Record], kind: str) -> Runs:
    """The parts of a kind, with what came of them; of parts under several settings, those of the last."""
    found = [(Part.parse(r["name"]), r) for r in records if r["kind"] == "run"]
    runs = [(part, record) for part, record in found if part.kind == kind]
    return [(part, record) for part, record in runs if record["settings"] == runs[-1][1]["settings"]]


def iou(record: Record, way: str, names: Iterable[str], threshold: int, first: int = 0) -> float:
    """The lake IoU of a run on some continents together, at a threshold, from a range of distances on."""
    return overlap(counts for name in names for counts in record[way][name][threshold][first:])


def chosen(runs: Runs, names: Sequence[str]) -> tuple[list[Record], int]:
    """The runs at the rate, and the threshold, with the best mean on some continents; the runs have one way."""
    by_rate: dict[float, list[Record]] = {}
    for part, record in runs:
        by_rate.setdefault(part.rate, []).append(record)
    choices = [(records, threshold) for records in by_rate.values() for threshold in range(len(THRESHOLDS))]
    return max(choices, key=lambda choice: fmean(iou(r, "tiles", names, choice[1]) for r in choice[0]), default=([], 0))


def spread(values: Iterable[float]) -> str:
    """The scores of all seeds in one cell."""
    found = tuple(values)
    return str(Scores(found)) if found else NONE


def at_best(records: Sequence[Record]) -> str:
    """The scores at the threshold that is best on the test itself: what a better choice of it could reach."""
    best = max(range(len(THRESHOLDS)), key=lambda at: sum(iou(r, "tiles", TEST, at) for r in records))
    return f"{spread(iou(r, 'tiles', TEST, best) for r in records)} at {THRESHOLDS[best]:g}"


def windows_table(runs: Runs) -> str:
    """A row for each extent: lake IoU on the continents for the test."""
    rows: list[list[str]] = []
    for extent in sorted({int(part.way) for part, _ in runs}):
        records, at = chosen([(part, record) for part, record in runs if part.way == str(extent)], VALIDATION)
        cells = [spread(iou(r, way, TEST, at) for r in records) for way in ("tiles", "whole")]
        cells += [spread(iou(r, "tiles", [name], at) for r in records) for name in TEST]
        cells += [spread(iou(r, "tiles", TEST, at, -1) for r in records), at_best(records)]
        about = [f"{extent}²", f"{Part.parse(records[0]['name']).rate:g}", f"{THRESHOLDS[at]:g}", f"{len(records)}"]
        rows.append([*about, *cells])
    window, far = (runs[0][1]["settings"]["window"], runs[0][1]["settings"]["edges"][-1]) if runs else (NONE, NONE)
    return markdown(
        ["trained on", "rate", "threshold", "seeds", "run on tiles as in training", f"run on {window}²", *TEST,
         f"further than {far} pixels from land", "at the test's own best threshold"],
        rows,
    )  # fmt: skip


def domains_table(runs: Runs) -> str:
    """A row for each continent: lake IoU of both ways, and one for the mean of the targets."""
    ways = [chosen([(part, record) for part, record in runs if part.way == way], [SOURCE]) for way in WAYS]

    def row(title: str, names: Sequence[str]) -> list[str]:
        values = [[fmean(iou(r, "tiles", [name], at) for name in names) for r in records] for records, at in ways]
        return [title, *(spread(scores) for scores in values)]

    rows = [row(f"{SOURCE} (labelled)", [SOURCE]), *(row(name, [name]) for name in TARGETS)]
    seeds = "/".join(f"{len(records)}" for records, _ in ways)
    return markdown([f"continent (seeds: {seeds})", *WAYS], [*rows, row("**mean of the others**", TARGETS)])
