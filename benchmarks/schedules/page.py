"""The tables and the figures, from the results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import problems
import published
import simulated
from gantt_figure import svg
from harness.plots import pyplot, save
from harness.results import Record, read
from harness.tables import NONE, commands_of, gib, markdown, place
from splits_page import text_of as splits_text

from mural.pipeline.schedule import Action
from mural.pipeline.timeline import ActionSpan
from mural.report.gantt import text

FILES = {"simulated": "simulated.json", "measured": "cpu.json", "splits": "splits.json"}
COLOURS = {
    "sequential": "#8a8f98",
    "GPipe": "#1b1b3a",
    "1F1B": "#2f5d8a",
    "1F1B eager": "#7fb2e5",
    "interleaved": "#3c9d9b",
    "GEMS lean": "#e8bd7a",
    "GEMS pipelined": "#e39b2d",
    "GEMS interleaved": "#b3261e",
}
DRAWN = (4, 8, 32)
"""Numbers of micro-batches in the figure."""
Results = dict[str, Any]


def as_json(results: Results) -> str:
    """Results as text, one record a line."""
    rest = {key: value for key, value in results.items() if key != "records"}
    rows = ",\n  ".join(json.dumps(record) for record in results["records"])
    return json.dumps(rest, indent=1)[:-2] + f',\n "records": [\n  {rows}\n ]\n}}\n'


def short(value: float) -> str:
    """A number with one digit behind the point, or none.

    >>> short(12.0), short(1.25)
    ('12', '1.2')
    """
    return f"{value:.1f}".removesuffix(".0")


# -------------------------------------------------------------------------------------------------------- simulated


def simulated_text(results: Results) -> str:
    """A row for each number of stages and micro-batches, and what each schedule takes."""
    cells = {(r["seats"], r["microbatches"], r["schedule"]): r for r in results["records"]}
    names = list(dict.fromkeys(r["schedule"] for r in results["records"]))
    rows = []
    for seats, microbatches in dict.fromkeys((s, m) for s, m, _ in cells):
        found = [cells[seats, microbatches, name] for name in names]
        each = [f"{short(r['makespan'])} · {100 * r['bubble']:.0f}% · {short(r['peak'])}" for r in found]
        rows.append([str(seats), str(microbatches), *each])
    loaded = []
    for seats in dict.fromkeys(r["seats"] for r in results["records"]):
        most = max(m for s, m, _ in cells if s == seats)
        found = [cells[seats, most, name] for name in names]
        each = [f"{100 * (r['makespan_with_messages'] / r['makespan'] - 1):.1f}%" for r in found]
        loaded.append([str(seats), str(most), *each])
    return "\n\n".join(
        [
            f"Commit {results['machine']['commit']}, {results['date'][:10]}. Command: `{results['command']}`.",
            "Each cell: makespan in units · mean idle share of a seat · largest peak of a seat, in activations of one "
            "micro-batch on one seat.",
            markdown(["stages", "micro-batches", *names], rows),
            f"What messages of {simulated.MESSAGE} units each add to the makespan:",
            markdown(["stages", "micro-batches", *names], loaded),
        ]
    )


def example_text() -> str:
    """Four stages and two images as text, and the units."""
    parts = []
    for name, timeline in simulated.example().items():
        parts.append(f"{name}: **{short(timeline.makespan)} units**\n\n```\n{text(timeline.spans, unit=1)}\n```")
    return "\n\n".join(parts)


def draw_simulated(results: Results, path: Path) -> None:
    """Efficiency and memory over the number of stages, a column for each number of micro-batches."""
    plt = pyplot()
    figure, axes = plt.subplots(2, len(DRAWN), figsize=(10, 5.6), sharex=True, sharey="row", squeeze=False)
    for column, microbatches in enumerate(DRAWN):
        for name, colour in COLOURS.items():
            found = [r for r in results["records"] if r["microbatches"] == microbatches and r["schedule"] == name]
            x = [r["seats"] for r in found]
            axes[0][column].plot(x, [100 * (1 - r["bubble"]) for r in found], color=colour, marker=".", label=name)
            axes[1][column].plot(x, [r["peak"] for r in found], color=colour, marker=".", label=name)
        axes[0][column].set_title(f"{microbatches} micro-batches", fontsize=9)
        axes[1][column].set_yscale("log", base=2)
        axes[1][column].set_yticks(simulated.MICROBATCHES, map(str, simulated.MICROBATCHES))
        axes[1][column].set_xticks(simulated.SEATS, map(str, simulated.SEATS))
        axes[1][column].set_xlabel("stages")
    axes[0][0].set_ylabel("time in which seats compute, %")
    axes[1][0].set_ylabel("largest peak, activations of a\nmicro-batch on one seat")
    axes[0][0].set_ylim(0, 102)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


# --------------------------------------------------------------------------------------------------------- measured

MEASURED_HEAD = (
    "model", "division", "ranks", "images", "step, s", "images/s", "÷ one rank", "÷ ranks", "largest rank, GiB",
    "messages a rank", "waits, s",
)  # fmt: skip


class Measured:
    """Divisions that were measured: with the images of a rank fixed (weak scaling), or those of a step (strong)."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.steps = [r for r in records if r["kind"] == "step"]
        self.done = [r for r in self.steps if "error" not in r]
        alone = sorted({r["batch"] for r in self.done if r["ranks"] == 1})
        self.each, self.all = (alone[0], alone[-1]) if alone else (0, 0)

    def weak(self) -> list[Record]:
        """As many images for each rank."""
        return [r for r in self.steps if r["batch"] == self.each * r["ranks"]]

    def strong(self) -> list[Record]:
        """As many images for all ranks together."""
        return [r for r in self.steps if r["batch"] == self.all] if self.all != self.each else []


def images_per_second(record: Record) -> float:
    """Of the median step."""
    return record["batch"] / statistics.median(record["seconds"])


def measured_text(records: list[Record]) -> str:
    """The tables of all divisions, what was published beside the same quotients of ours, and what failed."""
    found = Measured(records)
    parts = [caption(found)]
    scalings = {f"{found.all} images for all ranks together": found.strong()}
    scalings[f"{found.each} images for each rank"] = found.weak()
    for words, steps in scalings.items():
        if steps:
            parts += [f"### {words}", markdown(*beside(steps)), markdown(MEASURED_HEAD, measured_rows(steps))]
    return "\n\n".join(parts + failures(found))


def caption(found: Measured) -> str:
    """Where the numbers come from."""
    headers = [r for r in found.records if r["kind"] == "header"]
    versions = [r for r in found.records if r["kind"] == "versions"]
    at = headers[-1]["machine"]
    steps = sorted({len(record["seconds"]) for record in found.done} or {0})
    commits = ", ".join(sorted({header["machine"]["commit"] for header in headers}))
    most = " to ".join(map(str, sorted({steps[0], steps[-1]})))
    return (
        f"{at['cpu']}, {at['cores']} cores, one thread a rank, torch {versions[-1]['torch']}, Python {at['python']}, "
        f"commit {commits}, {headers[-1]['date'][:10]}; median of {most} steps after "
        f"one that is not counted.{commands_of(headers)}"
    )


def measured_rows(records: list[Record]) -> list[list[str]]:
    """A row for each division: its step, what it is worth beside one rank, and what it sends and waits for."""
    alone = {r["model"]: images_per_second(r) for r in records if r["ranks"] == 1 and "error" not in r}
    order = list(problems.PROBLEMS)
    rows: list[list[str]] = []
    for record in sorted(records, key=lambda r: (order.index(r["model"]), r["ranks"], "GEMS" in r["division"])):
        about = [problems.PROBLEMS[record["model"]].words, record["division"], str(record["ranks"])]
        about.append(str(record["batch"]))
        if "error" in record:
            rows.append([*about, "failed", *[NONE] * (len(MEASURED_HEAD) - len(about) - 1)])
            continue
        rate = images_per_second(record)
        times = rate / alone[record["model"]] if record["model"] in alone else None
        rows.append(
            [
                *about,
                f"{statistics.median(record['seconds']):.3g}",
                f"{rate:.3g}",
                f"{times:.2f}" if times else NONE,
                f"{100 * times / record['ranks']:.0f}%" if times else NONE,
                gib(max(record["peaks"])),
                str(max(record["messages"])) if "messages" in record else NONE,
                f"{statistics.mean(record['waited']):.2f}" if "waited" in record else NONE,
            ]
        )
    return rows


def failures(found: Measured) -> list[str]:
    """What ended each division that did not run."""
    return [
        f"{problems.PROBLEMS[r['model']].words}, {r['division']}, {r['batch']} images: {r['error'].splitlines()[-1]}"
        for r in found.steps
        if "error" in r
    ]


def beside(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """Published quotients, and ours of the same kind, for each model; a row for what any model has."""
    names = [name for name in problems.PROBLEMS if any(r["model"] == name for r in records)]
    rates = {(r["model"], r["division"]): images_per_second(r) for r in records if "error" not in r}
    rows: list[list[str]] = []
    for words, cited, above, below, times in quotients(records):
        values = {
            name: rates[name, above] / (times * rates[name, below])
            for name in names
            if (name, above) in rates and (name, below) in rates
        }
        cells = [f"{values[name]:.2f}×" if name in values else NONE for name in names]
        if times > 1:
            cells = [f"{100 * values[name]:.1f}%" if name in values else NONE for name in names]
        if values:
            rows.append([words, cited, *cells])
    return ["quotient of images/s", "published", *(problems.PROBLEMS[name].words for name in names)], rows


def quotients(records: list[Record]) -> list[tuple[str, str, str, str, int]]:
    """What was published, and the two divisions (the second so many times) whose rates say the same of ours."""
    ranks = max((r["ranks"] for r in records), default=1)
    stages = max((r["ranks"] for r in records if r["division"].startswith("GEMS")), default=1)
    data = ranks // stages
    plain, line, hybrid = f"data {ranks}", f"stage {stages}", f"data {data} × stage {stages}"
    twice, twofold, apart = f"GEMS {stages}", f"data {data} × GEMS {stages}", f"{ranks} apart"
    over, kept = f"{published.HYBRID_OVER_DATA}× (HyPar-Flow)", f"{100 * published.SCALING_EFFICIENCY}% (GEMS)"
    return [
        (f"{hybrid} ÷ {plain}", over, hybrid, plain, 1),
        (f"{twofold} ÷ {plain}", over, twofold, plain, 1),
        (f"{twofold} ÷ ({data} · {twice})", kept, twofold, twice, data),
        (f"{hybrid} ÷ ({data} · {line})", kept, hybrid, line, data),
        (f"{plain} ÷ ({ranks} · one rank)", kept, plain, "one rank", ranks),
        (f"{twofold} ÷ one rank", f"{published.SPEEDUP:.0f}× (GEMS, 7 h → 28 min)", twofold, "one rank", 1),
        (f"{plain} ÷ one rank", f"{published.SPEEDUP:.0f}× (GEMS, 7 h → 28 min)", plain, "one rank", 1),
        (f"{twice} ÷ {line}", NONE, twice, line, 1),
        (f"{apart} ÷ ({ranks} · one rank)", NONE, apart, "one rank", ranks),
        (f"{plain} ÷ {apart}", NONE, plain, apart, 1),
        (f"{twofold} ÷ {apart}", NONE, twofold, apart, 1),
    ]


def spans_of(rows: list[list[Any]]) -> list[ActionSpan]:
    """Spans from the rows of a result."""
    return [ActionSpan(seat, Action(*action), begin, end) for seat, *action, begin, end in rows]


def draw_measured(found: Measured, folder: Path) -> None:
    """For each division whose spans were measured: predicted above measured."""
    for record in (r for r in found.done if "spans" in r):
        title = f"{problems.PROBLEMS[record['model']].words}: {record['division']}, {record['batch']} images"
        panels = {"predicted": spans_of(record["predicted_spans"]), "measured": spans_of(record["spans"])}
        name = f"{record['model']}-{record['division'].replace(' ', '-').lower()}.svg"
        (folder / name).write_text(svg(panels, title))


def write(here: Path) -> None:
    """Put the tables of all results into the page, and draw the figures."""
    readme, results, figures = here / "README.md", here / "results", here / "figures"
    figures.mkdir(exist_ok=True)
    place(readme, "example", example_text())
    spans = {name: timeline.spans for name, timeline in simulated.example().items()}
    (figures / "gems.svg").write_text(svg(spans, "Four stages, two images: forward 1 unit, backward 2", "units"))
    if (results / FILES["simulated"]).is_file():
        found = json.loads((results / FILES["simulated"]).read_text())
        place(readme, "simulated", simulated_text(found))
        draw_simulated(found, figures / "simulated.svg")
    if (results / FILES["measured"]).is_file():
        records = read(results / FILES["measured"])
        place(readme, "measured", measured_text(records))
        draw_measured(Measured(records), figures)
    if (results / FILES["splits"]).is_file():
        place(readme, "splits", splits_text(read(results / FILES["splits"])))
