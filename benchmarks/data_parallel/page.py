"""The tables and the figure, from the results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import many_ranks_page
import published
import sharing_page
from harness.plots import pyplot, save
from harness.results import read
from harness.tables import markdown, place

GOAL = 1.03
TITLES = {
    "ddp": "DistributedDataParallel",
    "ddp views": "DistributedDataParallel, `gradient_as_bucket_view`",
    "ddp loss": "DistributedDataParallel, and the loss of the whole batch",
    "ddp sync": "DistributedDataParallel, `SyncBatchNorm`",
    "mural": '**mural**, `batchnorm="rank"`',
    "mural own loss": 'mural, `batchnorm="rank"`, loss of each rank\'s images',
    "mural exact": "mural, batch norm over the whole batch",
}
COLOURS = {"compute": "#2f5d8a", "communication": "#e39b2d", "idle": "#c9c9c9"}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: list[float], form: str) -> str:
    """The median, with the quartiles behind it.

    >>> spread([3.0, 1.0, 2.0], ".1f")
    '2.0 (1.5 to 2.5)'
    """
    low, middle, high = (format(v, form) for v in quartiles(values))
    return f"{middle} ({low} to {high})"


def pair_rows(results: dict[str, Any]) -> list[list[str]]:
    """A row for each model and variant: times, ratios to DDP's step of the same round, and each repeat's median."""
    rows: list[list[str]] = []
    for name, repeats in results["pairs"].items():
        for key, title in TITLES.items():
            if key not in repeats[0]["seconds"]:
                continue
            seconds = [s for repeat in repeats for s in repeat["seconds"][key]]
            each = [
                [a / b for a, b in zip(repeat["seconds"][key], repeat["seconds"]["ddp"], strict=True)]
                for repeat in repeats
            ]
            medians = ", ".join(f"{statistics.median(ratios):.3f}" for ratios in each)
            ratio = "–" if key == "ddp" else f"{spread([r for ratios in each for r in ratios], '.3f')}"
            if key == "mural":
                ratio += f"; goal ≤ {GOAL}"
            gap = "–" if key == "ddp" else f"{max(r['differences'][key] for r in repeats):.0e}"
            queued = [1e3 * s for repeat in repeats for s in repeat.get("queued", {}).get(key, ())]
            step, forward = spread([1e3 * s for s in seconds], ".1f"), spread(queued, ".1f") if queued else "–"
            rows.append([name, title, step, ratio, "–" if key == "ddp" else medians, gap, forward])
    return rows


PAIR_HEAD = (
    "model", "variant", "step, ms", "÷ DDP", "÷ DDP, each repeat", "gradients from DDP's", "forward is queued, ms",
)  # fmt: skip
SHARE_HEAD = ("model, mesh", "gradients", "rank", "step, ms", "compute", "communication", "idle", "hidden, ms")


def share_rows(results: dict[str, Any]) -> list[list[str]]:
    """A row for each rank of each mesh."""
    rows: list[list[str]] = []
    for key, ranks in results.get("shares", {}).items():
        name, mesh, when = key.split("/")
        for rank, spent in enumerate(ranks):
            parts = [f"{100 * spent[part] / spent['step']:.1f}%" for part in COLOURS]
            when_words = "in backward" if when == "overlap" else "after backward"
            hidden = f"{1e3 * spent['hidden']:.1f}" if when == "overlap" else "–"
            rows.append([f"{name}, {mesh}", when_words, str(rank), f"{1e3 * spent['step']:.1f}", *parts, hidden])
    return rows


SCALING_HEAD = (
    "processes",
    "document: s for 4,000 iterations, one GPU",
    "÷ 1",
    "mural: s for 4,000, one CPU core each",
    "÷ 1",
)


def scaling_rows(results: dict[str, Any]) -> list[list[str]]:
    """A row for each number of processes; ours is the median iteration times 4,000."""
    found = {int(n): published.ITERATIONS * statistics.median(s) for n, s in results.get("scaling", {}).items()}
    return [
        [
            str(n),
            f"{published.SECONDS[n]:.1f}",
            f"{published.SECONDS[n] / published.SECONDS[1]:.2f}",
            f"{seconds:.1f}",
            f"{seconds / found[1]:.2f}",
        ]
        for n, seconds in found.items()
    ]


def caption(results: dict[str, Any]) -> str:
    """Where and how the numbers came about."""
    at, settings = results["machine"], results["settings"]
    device = f"{results['device']} shared by all ranks, " if results["device"] != "cpu" else ""
    return (
        f"{device}{at['cpu']}, {at['cores']} cores, one thread a rank, torch {results['torch']}, Python "
        f"{at['python']}, load {results['load_at_start']:.1f} at the start, commit {at['commit']}, "
        f"{results['date'][:10]}; {settings['ranks']} ranks, "
        f"{settings['repeats']} repeats of {settings['rounds']} rounds. Command: `{results['command']}`. Median, with "
        f"the quartiles in parentheses."
    )


def text_of(results: dict[str, Any]) -> str:
    """All tables of a file of results."""
    parts = [caption(results)]
    for key, head, rows in (
        ("pairs", PAIR_HEAD, pair_rows),
        ("shares", SHARE_HEAD, share_rows),
        ("scaling", SCALING_HEAD, scaling_rows),
    ):
        if results.get(key):
            parts.append(markdown(head, rows(results)))
    return "\n\n".join(parts)


def draw(results: dict[str, Any], path: Path) -> None:
    """Stacked bars for each rank: what part of its step it computed, communicated, and was idle."""
    plt = pyplot()
    keys = list(results["shares"])
    names = sorted({key.split("/")[0] for key in keys})
    figure, axes = plt.subplots(len(names), 2, figsize=(9, 2.6 * len(names) + 0.6), sharey=True, squeeze=False)
    for row, name in enumerate(names):
        for column, when in enumerate(("behind", "overlap")):
            chosen = [key for key in keys if key.startswith(f"{name}/") and key.endswith(f"/{when}")]
            draw_panel(axes[row][column], results["shares"], chosen)
            where = "after backward, as in the document" if when == "behind" else "in buckets during backward"
            axes[row][column].set_title(f"{name}: gradients {where}", fontsize=9)
        axes[row][0].set_ylabel("share of the step, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def draw_panel(axis: Any, shares: dict[str, Any], keys: list[str]) -> None:
    """The bars of one model, all meshes, one after the other."""
    at = 0.0
    ticks: list[float] = []
    words: list[str] = []
    for number, key in enumerate(keys):
        first = at
        for rank, spent in enumerate(shares[key]):
            bottom = 0.0
            for part, colour in COLOURS.items():
                share = 100 * spent[part] / spent["step"]
                label = part if number == 0 and rank == 0 else None
                axis.bar(at, share, bottom=bottom, color=colour, width=0.85, label=label)
                bottom += share
            at += 1
        ticks.append((first + at - 1) / 2)
        words.append(key.split("/")[1].replace(" × ", "\n× "))
        at += 0.7
    axis.set_xticks(ticks, words)
    axis.grid(axis="x", visible=False)
    axis.set_axisbelow(True)


def write(here: Path) -> None:
    """Put the tables of all results into the page, and draw the figure."""
    readme = here / "README.md"
    for name in ("cpu", "cuda", "nccl"):
        source = here / "results" / f"{name}.json"
        if source.is_file():
            results = json.loads(source.read_text())
            place(readme, name, text_of(results))
            if results.get("shares"):
                draw(results, here / "figures" / "shares.svg")
    for name, text in (("sixteen", many_ranks_page.text_of), ("sharing", sharing_page.text_of)):
        source = here / "results" / f"{name}.json"
        if source.is_file():
            place(readme, name, text(read(source)))
