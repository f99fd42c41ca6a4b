"""The tables of the splits: steps and memory by what cuts are balanced by, measured and predicted."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from harness.results import Record
from harness.tables import NONE, environment, markdown
from splits import BY, LEVELS, NETS, STAGES, Cell

TITLES = {"layers": "layers", "time": "fitted time", "measured": "measured time", "memory": "memory"}
Row = tuple[str, int, str]
"""Model, stages, level."""


class Splits:
    """What was found, by cell: cells of equal cuts have one measurement in common.

    Layers that are measured again may cut a cell elsewhere. Until these cuts have run, the cell keeps those that ran.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.cuts = {r["name"]: r for r in records if r["kind"] == "cuts"}
        run = {(r["model"], r["stages"], tuple(r["names"])): r for r in records if r["kind"] == "split"}
        self.run = run.values()
        asked = {name: r for r in self.run for name in r["cells"]}
        self.of: dict[Cell, Record] = {}
        for model, stages, level in ordered(self.cuts):
            for by in BY:
                cell = Cell(model, stages, level, by)
                names = self.cuts.get(cell.name, {}).get("names", ())
                record = run.get((model, stages, tuple(names)), asked.get(cell.name))
                if record is not None:
                    self.of[cell] = record

    @property
    def rows(self) -> list[Row]:
        """The rows of the tables: what was measured, or cannot be."""
        return [row for row in ordered(self.cuts) if any(self.told(Cell(*row, by)) for by in BY)]

    def told(self, cell: Cell) -> bool:
        """Whether something can be said about a cell."""
        return cell in self.of or "impossible" in self.cuts.get(cell.name, {})


def ordered(names: Iterable[str]) -> list[Row]:
    """The rows that the names of cells are in, in the order of the tables."""
    there = {tuple(name.split("/")[:3]) for name in names}
    every = [(model, stages, level) for model in NETS for stages in sorted(STAGES) for level in LEVELS]
    return [row for row in every if tuple(map(str, row)) in there]


def step(record: Record) -> float:
    """The median step, in seconds."""
    return statistics.median(record["seconds"])


def text_of(records: Sequence[Record]) -> str:
    """Where the numbers come from, what they say, and the tables."""
    found = Splits(records)
    parts = [environment(records), *summary(found)]
    parts += ["Milliseconds of a step, measured (predicted by the fitted model · from layers measured alone):"]
    parts += [markdown(*times(found))]
    parts += ["MiB of the rank that grew most, measured (predicted):", markdown(*memory(found))]
    return "\n\n".join(parts + failures(records))


def summary(found: Splits) -> list[str]:
    """How often, and by how much, cuts by one thing are better than cuts by layers; how good predictions are."""
    lines: list[str] = []
    for by, what in (("time", step), ("measured", step), ("memory", grown)):
        pairs = compared(found, by)
        if pairs:
            ratios = [what(a) / what(b) for a, b in pairs]
            said = f"{'memory' if by == 'memory' else 'step'} ÷ that of cuts by layers"
            lines.append(
                f"- {TITLES[by]}: {said} {statistics.geometric_mean(ratios):.2f} in the geometric mean of {len(pairs)} "
                f"cases ({min(ratios):.2f} to {max(ratios):.2f}), less in {sum(r < 0.98 for r in ratios)}, "
                f"more in {sum(r > 1.02 for r in ratios)}."
            )
    for key, words in (("fitted", "the fitted model"), ("by_layers", "layers measured alone")):
        errors = [abs(r[key] / step(r) - 1) for r in found.run if key in r]
        if errors:
            lines.append(f"- Steps predicted from {words}: {100 * statistics.mean(errors):.0f}% off on average.")
    return ["\n".join(lines)] if lines else []


def compared(found: Splits, by: str) -> list[tuple[Record, Record]]:
    """Cells of one objective, and of layers in the same row, where the cuts differ."""
    pairs = [(found.of.get(Cell(*row, by)), found.of.get(Cell(*row, "layers"))) for row in found.rows]
    return [(a, b) for a, b in pairs if a is not None and b is not None and a["names"] != b["names"]]


def times(found: Splits) -> tuple[list[str], list[list[str]]]:
    """Steps by what cuts are balanced by, and their ratio to those of cuts by layers, predicted and measured."""
    rows = [
        [*titles(row), *(time_cell(found, Cell(*row, by)) for by in BY), *(ratio(found, row, by) for by in BY[1:3])]
        for row in found.rows
    ]
    ratios = [f"{TITLES[by]} ÷ layers: predicted · measured" for by in BY[1:3]]
    return ["model", "stages", "level", *TITLES.values(), *ratios], rows


def titles(row: Row) -> list[str]:
    """The first cells of a row."""
    return [NETS[row[0]].words, str(row[1]), row[2]]


def time_cell(found: Splits, cell: Cell) -> str:
    """The step of a cell, with both predictions; why there is none."""
    record = found.of.get(cell)
    if record is None:
        return "too few cuts" if "impossible" in found.cuts.get(cell.name, {}) else NONE
    return f"{1e3 * step(record):.0f} ({1e3 * record['fitted']:.0f} · {1e3 * record['by_layers']:.0f})"


def ratio(found: Splits, row: Row, by: str) -> str:
    """The step of one objective over that of layers."""
    mine, layers = found.of.get(Cell(*row, by)), found.of.get(Cell(*row, "layers"))
    if mine is None or layers is None:
        return NONE
    if mine is layers:
        return "the same cuts"
    key = "fitted" if by == "time" else "by_layers"
    return f"{mine[key] / layers[key]:.2f} · {step(mine) / step(layers):.2f}"


def grown(record: Record) -> float:
    """Bytes by which the rank grew that grew most."""
    return max(record["grown"])


def memory(found: Splits) -> tuple[list[str], list[list[str]]]:
    """The rank that grew most, by what cuts are balanced by."""
    rows: list[list[str]] = []
    for row in found.rows:
        mine = {by: found.of.get(Cell(*row, by)) for by in BY}
        told = [memory_cell(mine[by], found.cuts.get(Cell(*row, by).name, {})) for by in BY]
        lean, layers = mine["memory"], mine["layers"]
        both = "the same cuts" if lean is layers else f"{grown(lean) / grown(layers):.2f}" if lean and layers else NONE
        rows.append([*titles(row), *told, NONE if lean is None or layers is None else both])
    return ["model", "stages", "level", *TITLES.values(), "memory ÷ layers"], rows


def memory_cell(record: Record | None, cuts: Record) -> str:
    """What the rank grew by that grew most, and what was predicted if it was for these cuts."""
    if record is None:
        return NONE
    predicted = f" ({cuts['memory'] / 2**20:.0f})" if cuts["names"] == record["names"] else ""
    return f"{grown(record) / 2**20:.0f}{predicted}"


def failures(records: Sequence[Record]) -> list[str]:
    """What ended each split that did not run."""
    done = {r["name"] for r in records if r["kind"] == "split"}
    failed = [r for r in records if r["kind"] == "failure" and r["name"] not in done]
    return [f"{r['name']}: {r['error'].splitlines()[-1]}" for r in failed]
