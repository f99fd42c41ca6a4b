"""README.md's tables and the figures, from results/."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fit import samples_of
from harness.plots import PUBLISHED_COLOUR, pyplot, save
from harness.tables import environment, markdown, place
from polynomial import polynomials
from predicted import Row, rows, summary
from twelve import Twelve

from mural.cost.fitted_model import load
from mural.cost.predict import times
from mural.graph import capture
from mural.graph.differentiable import differentiable

MODELS = {"cuda": "h200", "cpu": "cpu"}
TITLES = {
    "fitted": "**fitted**: roofline by variant, trees on the rest, copies, sums, the host's queue",
    "roofline": "the same without trees",
    "polynomial": "the same with the document's polynomial for convolutions",
}
OURS = "#2f5d8a"
HEAD = ("model or block", "input", "type", "step, ms", "predicted", "error", "peak, MiB", "predicted", "error")


def records_of(here: Path, device: str) -> list[dict[str, Any]]:
    """Everything that was measured on a kind of device."""
    found = json.loads((here / "results" / f"{device}.json").read_text())["records"]
    with gzip.open(here / "results" / f"sweep-{device}.jsonl.gz", "rt") as file:
        return found + [json.loads(line) for line in file]


def percent(value: float, sign: bool = True) -> str:
    """A share in words.

    >>> percent(0.0314), percent(0.5, sign=False)
    ('+3.1%', '50.0%')
    """
    return f"{100 * value:+.1f}%" if sign else f"{100 * value:.1f}%"


def held_table(found: Sequence[Row]) -> str:
    """A row for each entry of the held-out list."""
    lines = [
        [
            row.name, row.shape, row.dtype,
            f"{1e3 * (row.forward + row.backward):.1f}", f"{1e3 * sum(row.by['fitted']):.1f}",
            percent(row.error("fitted")),
            f"{row.peak / 2**20:.0f}", f"{row.walked / 2**20:.0f}", percent(row.memory_error),
        ]
        for row in found
    ]  # fmt: skip
    return markdown(HEAD, lines)


def summary_table(found: Sequence[Row]) -> str:
    """Mean, 90th percentile and largest error of each predictor."""
    lines = [["time of a step", title, *numbers([row.error(key) for row in found])] for key, title in TITLES.items()]
    if found[0].device is not None:
        off = [sum(row.by["device"]) / sum(row.device) - 1 for row in found if row.device]
        lines.append(["time of the device alone", "fitted, without the host's queue", *numbers(off)])
    lines.append(["peak memory", "**walk** with workspaces", *numbers([row.memory_error for row in found])])
    lines.append(["peak memory", "walk without workspaces", *numbers([row.bare / row.peak - 1 for row in found])])
    layers = [layer for row in found for layer in row.layers]
    for phase in ("forward", "backward") if layers else ():
        chosen = [layer for layer in layers if layer[0] == phase]
        for place_, title in ((2, "fitted"), (3, "polynomial")):
            off = [layer[place_] / layer[1] - 1 for layer in chosen]
            lines.append([f"{len(chosen)} convolutions alone, {phase}", title, *numbers(off)])
    return markdown(("of what", "predictor", "mean error", "90th percentile", "largest"), lines)


def numbers(errors: Sequence[float]) -> list[str]:
    return [percent(value, sign=False) for value in summary(errors)]


def twelve_table(records: Sequence[dict[str, Any]], device: str) -> str:
    """The document's net, layer by layer."""
    record = next(r for r in records if r["kind"] == "twelve")
    graph = capture(Twelve(), (record["batch"], 3, record["size"], record["size"]))
    found = times(graph, load(MODELS[device]), differentiable(graph, image=True))
    convs = [node.id for node in graph.nodes if node.op == "conv2d"]
    lines: list[list[str]] = []
    for i, name in enumerate(record["layers"]):
        cells = [name]
        means: list[float] = []
        for phase in ("forward", "backward"):
            values = [1e3 * row[i] for row in record["seconds"][phase]]
            means.append(statistics.fmean(values[1:]))
            each = (min(values), statistics.fmean(values), max(values), values[0], values[-1])
            cells += [" / ".join(f"{value:.2f}" for value in each), f"{1e3 * getattr(found, phase)[convs[i]]:.2f}"]
        lines.append([*cells, f"{means[1] / means[0]:.2f}"])
    columns = "min / mean / max / first / last, ms"
    head = ("layer", f"forward: {columns}", "predicted", f"backward: {columns}", "predicted", "backward ÷ forward")
    total = len(record["seconds"]["forward"])
    return f"Batch {record['batch']}, {record['size']}², {total} iterations.\n\n" + markdown(head, lines)


def draw(found: Sequence[Row], path: Path) -> None:
    """Predicted against measured: time and memory, on logarithmic scales, with 10% and 5% beside the diagonal."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 4.2))
    spent = [1e3 * (row.forward + row.backward) for row in found]
    left.plot(spent, [1e3 * sum(row.by["polynomial"]) for row in found], "v", color=PUBLISHED_COLOUR, fillstyle="none",
              markersize=4, label="convolutions by the document's polynomial")  # fmt: skip
    left.plot(spent, [1e3 * sum(row.by["fitted"]) for row in found], "o", color=OURS, markersize=4, label="fitted")
    held = [row.peak / 2**20 for row in found]
    right.plot(held, [row.walked / 2**20 for row in found], "o", color=OURS, markersize=4, label="walk")
    for axis, values, band, what in ((left, spent, 0.1, "time of a step, ms"), (right, held, 0.05, "peak memory, MiB")):
        ends = [min(values) * 0.8, max(values) * 1.25]
        axis.plot(ends, ends, color="#888888", linewidth=1)
        axis.fill_between(
            ends, [e * (1 - band) for e in ends], [e * (1 + band) for e in ends], color="#dddddd", zorder=0
        )
        axis.set(xscale="log", yscale="log", xlabel=f"measured {what}", ylabel="predicted")
        axis.legend(frameon=False, fontsize=8)
    save(figure, path)


def write(here: Path) -> None:
    """Put the tables of all results into the page, and draw the figures."""
    for device in MODELS:
        if not (here / "results" / f"{device}.json").is_file():
            continue
        records = records_of(here, device)
        found = rows(device, records, load(MODELS[device]), polynomials(samples_of(records, device)))
        parts = [environment(records), summary_table(found), held_table(found)]
        place(here / "README.md", device, "\n\n".join(parts))
        place(here / "README.md", f"twelve-{device}", twelve_table(records, device))
        draw(found, here / "figures" / f"{device}.svg")
