"""The tables and the figures, from the results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import problems
import published
import simulated
from harness.plots import pyplot, save
from harness.tables import NONE, gib, markdown, place

from mural.pipeline.gantt import chart, text
from mural.pipeline.schedule import Action
from mural.pipeline.timeline import Span

FILES = {"simulated": "simulated.json", "measured": "cpu.json"}
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

MEASURED_HEAD = ("model", "division", "ranks", "step, s", "images/s", "÷ one rank", "÷ ranks", "largest rank, GiB")


def collected(files: list[Results]) -> Results:
    """Several runs as one: the later of two records about the same counts."""
    if unlike := [name for name in ("machine", "torch") if any(file[name] != files[0][name] for file in files)]:
        raise SystemExit(f"these runs differ in {', '.join(unlike)}: put those of one machine and version together")
    records = {(r["model"], r["division"]): r for file in files for r in file["records"]}
    commands = [command for file in files for command in file.get("commands", [file["command"]])]
    loads = {"load_at_start": max(file["load_at_start"] for file in files)}
    return files[0] | loads | {"commands": list(dict.fromkeys(commands)), "records": list(records.values())}


def done(results: Results) -> list[Results]:
    """The records of divisions that ran."""
    return [record for record in results["records"] if "error" not in record]


def images_per_second(record: Results) -> float:
    """Of the median step."""
    return record["batch"] / statistics.median(record["seconds"])


def measured_text(results: Results) -> str:
    """The table of all divisions, what was published beside the same quotients of ours, and what failed."""
    at, settings = results["machine"], results["settings"]
    steps = sorted({len(record["seconds"]) for record in done(results)} or {0})
    commands = ", ".join(f"`{command}`" for command in results.get("commands", [results["command"]]))
    caption = (
        f"{at['cpu']}, {at['cores']} cores, one thread a rank, torch {results['torch']}, Python {at['python']}, load "
        f"{results['load_at_start']:.1f} at the start, commit {at['commit']}, {results['date'][:10]}; "
        f"{settings['batch']} images a step, {settings['microbatches']} micro-batches where there are stages, median "
        f"of {' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} steps after one that is not counted. "
        f"Commands: {commands}."
    )
    tables = [markdown(MEASURED_HEAD, measured_rows(results)), markdown(*beside(results))]
    return "\n\n".join([caption, *tables, *failures(results)])


def measured_rows(results: Results) -> list[list[str]]:
    """A row for each division: its step, and what it is worth beside one rank."""
    alone = {r["model"]: images_per_second(r) for r in done(results) if r["ranks"] == 1}
    rows: list[list[str]] = []
    for record in results["records"]:
        about = [problems.PROBLEMS[record["model"]].words, record["division"], str(record["ranks"])]
        if "error" in record:
            rows.append([*about, "failed", *[NONE] * (len(MEASURED_HEAD) - 4)])
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
            ]
        )
    return rows


def failures(results: Results) -> list[str]:
    """What ended each division that did not run."""
    return [
        f"{problems.PROBLEMS[r['model']].words}, {r['division']}: {r['error'].splitlines()[-1]}"
        for r in results["records"]
        if "error" in r
    ]


def beside(results: Results) -> tuple[list[str], list[list[str]]]:
    """Published quotients, and ours of the same kind, for each model that has the divisions."""
    names = list(dict.fromkeys(r["model"] for r in results["records"]))
    rates = {(r["model"], r["division"]): images_per_second(r) for r in done(results)}
    stages, ranks = results["settings"]["stages"], results["settings"]["ranks"]
    data = max(1, ranks // stages)
    plain, line = f"data {data * stages}", f"GEMS {stages}"
    hybrid, twofold = f"data {data} × stage {stages}", f"data {data} × {line}"
    efficiency = 100 * published.SCALING_EFFICIENCY
    kinds = [
        (f"{hybrid} ÷ {plain}", f"{published.HYBRID_OVER_DATA}× (HyPar-Flow, ResNet-1001)", hybrid, plain, 1, "×"),
        (f"{twofold} ÷ ({data} · {line})", f"{efficiency}% (GEMS, 1,024 GPUs)", twofold, line, data, "%"),
        (f"{twofold} ÷ one rank", f"{published.SPEEDUP:.0f}× (GEMS, 7 h → 28 min)", twofold, "one rank", 1, "×"),
    ]
    rows = []
    for words, cited, above, below, times, unit in kinds:
        cells = []
        for name in names:
            if (name, above) in rates and (name, below) in rates:
                value = rates[name, above] / (times * rates[name, below])
                cells.append(f"{100 * value:.1f}%" if unit == "%" else f"{value:.2f}×")
            else:
                cells.append(NONE)
        rows.append([words, cited, *cells])
    return ["quotient of images/s", "published", *(problems.PROBLEMS[name].words for name in names)], rows


def spans_of(rows: list[list[Any]]) -> list[Span]:
    """Spans from the rows of a result."""
    return [Span(seat, Action(*action), begin, end) for seat, *action, begin, end in rows]


def draw_measured(results: Results, folder: Path) -> None:
    """For each division whose spans were measured: predicted above measured."""
    for record in (r for r in done(results) if "spans" in r):
        title = f"{problems.PROBLEMS[record['model']].words}: {record['division']}, {record['batch']} images"
        panels = {"predicted": spans_of(record["predicted_spans"]), "measured": spans_of(record["spans"])}
        name = f"{record['model']}-{record['division'].replace(' ', '-').lower()}.svg"
        (folder / name).write_text(chart(panels, title))


TEXTS = {"simulated": simulated_text, "measured": measured_text}


def write(here: Path) -> None:
    """Put the tables of all results into the page, and draw the figures."""
    readme = here / "README.md"
    place(readme, "example", example_text())
    spans = {name: timeline.spans for name, timeline in simulated.example().items()}
    figures = here / "figures"
    figures.mkdir(exist_ok=True)
    (figures / "gems.svg").write_text(chart(spans, "Four stages, two images: forward 1 unit, backward 2", "units"))
    for part, make in TEXTS.items():
        source = here / "results" / FILES[part]
        if source.is_file():
            results = json.loads(source.read_text())
            place(readme, part, make(results))
            if part == "simulated":
                draw_simulated(results, figures / "simulated.svg")
            else:
                draw_measured(results, figures)
