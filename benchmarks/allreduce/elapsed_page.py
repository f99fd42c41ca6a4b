"""The tables of the trainings' seconds: by algorithm, width and processes, and what too many processes cost."""

from __future__ import annotations

from collections.abc import Sequence

from digits import ALONE
from elapsed import NAMES
from harness.results import Record
from harness.tables import NONE, environment, markdown

KINDS = ("elapsed",)


def line(record: Record) -> str:
    """A measurement in one line, for the terminal."""
    told = ", ".join(f"{name} {found['seconds']:.2f} s" for name, found in record["found"].items())
    return f"{record['name']}: {told}"


def text_of(records: Sequence[Record]) -> str:
    """Where the numbers come from, and the tables."""
    found = {r["name"]: r for r in records if r["kind"] in KINDS}
    runs = sorted(found.values(), key=lambda r: (r["transport"], r["width"], r["ranks"]))
    parts = [environment(records)]
    parts += ["Seconds of a training (of these in averages, the mean of the ranks):", markdown(*seconds_table(runs))]
    cores = next((r["machine"]["cores"] for r in reversed(records) if r["kind"] == "header"), 0)
    crowd = crowded_table(runs, cores)
    if crowd[1]:
        said = f"Seconds in averages on more processes than the {cores} cores ÷ on the most that have a core each:"
        parts += [said, markdown(*crowd)]
    failed = [r for r in records if r["kind"] == "failure" and r["name"] not in found]
    return "\n\n".join([*parts, *(f"{r['name']}: {r['error'].splitlines()[-1]}" for r in failed)])


def seconds_table(runs: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """A row for each transport, width and number of processes."""
    alone = {r["width"]: r["found"][ALONE]["seconds"] for r in runs if r["ranks"] == 1}
    rows: list[list[str]] = []
    for run in (r for r in runs if r["ranks"] > 1):
        found = run["found"]
        cells = [f"{found[name]['seconds']:.2f} ({found[name]['averaging']:.2f})" for name in NAMES]
        best = min(NAMES, key=lambda name: found[name]["seconds"])
        cells[NAMES.index(best)] = f"**{cells[NAMES.index(best)]}**"
        one = f"{alone[run['width']]:.2f}" if run["width"] in alone else NONE
        about = [run["transport"], f"{run['width']} ({run['bytes'] / 1024:.0f} KiB)", str(run["ranks"]), one]
        rows.append([*about, *cells, f"{found['tree']['seconds'] / found['ring']['seconds']:.2f}"])
    return ["over", "width (message)", "processes", ALONE, *NAMES, "tree ÷ ring"], rows


def crowded_table(runs: Sequence[Record], cores: int) -> tuple[list[str], list[list[str]]]:
    """How much longer averages take where processes share cores."""
    rows: list[list[str]] = []
    for transport, width in dict.fromkeys((r["transport"], r["width"]) for r in runs):
        mine = {r["ranks"]: r["found"] for r in runs if (r["transport"], r["width"]) == (transport, width)}
        fit = max((n for n in mine if 1 < n <= cores), default=0)
        for ranks in (n for n in sorted(mine) if fit and n > cores):
            ratios = [mine[ranks][name]["averaging"] / mine[fit][name]["averaging"] for name in NAMES]
            rows.append([transport, str(width), f"{ranks} ÷ {fit}", *(f"{ratio:.1f}" for ratio in ratios)])
    return ["over", "width", "processes", *NAMES], rows
