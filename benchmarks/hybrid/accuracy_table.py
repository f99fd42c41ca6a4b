"""Tables of training next to the document's, and its three conclusions, checked."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import published
from harness.results import Record
from harness.tables import NONE, markdown

WAYS = ("data", "model", "hybrid", "hybrid, in two groups")
Runs = Sequence[Record]


def plain(runs: Runs) -> list[Record]:
    """The runs of the tables: in float32, from the weights as they are drawn."""
    return [r for r in runs if r.get("dtype", "float32") == "float32" and not r.get("nudge")]


def agreement_text(runs: Runs) -> str:
    """Losses and accuracies on the way at the smallest batch, in float32 and in float64; nothing without the latter."""
    first = next((r for r in runs if r.get("dtype", "float32") == "float64"), None)
    if first is None:
        return ""
    key = ("batch", "iterations", "width")
    same = [r for r in runs if all(r[k] == first[k] for k in key) and r["ranks"] <= 2]
    double = [r for r in same if r.get("dtype", "float32") == "float64"]
    points = [iteration for iteration, _ in double[0]["accuracies"]]
    rows: list[list[str]] = []
    for r in sorted(same, key=lambda r: (r.get("dtype", "float32"), r["ranks"])):
        way = f"{r['way']}, first weights changed by {r['nudge']:g}" if r.get("nudge") else r["way"]
        cells = [f"{loss:.6g} · {100 * a:.1f}%" for loss, (_, a) in zip(r["losses"], r["accuracies"], strict=True)]
        rows.append([r.get("dtype", "float32"), way, *cells])
    last = [r["losses"][-1] for r in double]
    apart = (max(last) - min(last)) / min(last)
    words = f"are within {apart:.0e} of each other" if apart else "are the same in the six digits that are kept"
    text = (
        f"Do the ways differ by more than rounding? Batch {double[0]['batch']} in float32, also with first weights "
        f"that were changed as rounding may, and in float64, where the last losses of all ways {words}. "
        f"Loss · accuracy:"
    )
    return "\n\n".join([text, markdown(["", "way", *(f"after {n}" for n in points)], rows)])


def settings(runs: Runs) -> list[tuple[int, int]]:
    """Iterations and width of the runs: those of the same settings stand in one table."""
    return sorted({(r["iterations"], r["width"]) for r in runs})


def training_text(runs: Runs) -> str:
    """For each setting: batches on two ranks, then ranks at one batch; every way, beside what was published."""
    parts: list[str] = []
    for iterations, width in settings(runs):
        mine = [r for r in runs if (r["iterations"], r["width"]) == (iterations, width)]
        some = mine[0]
        parts.append(
            f"Width {width}, {iterations:,} iterations of SGD (rate {some['rate']:g}, a tenth of it in the last "
            f"quarter; momentum 0.9, decay 0.004), {some['classes']} classes, {some['each']:,} training and "
            f"{some['tests']:,} test crops of each. Accuracy · seconds:"
        )
        parts += [markdown(*by_batch(mine, iterations)), markdown(*by_ranks(mine))]
    return "\n\n".join(parts)


def cell(runs: Runs, way: str, ranks: int, batch: int) -> str:
    """Accuracy and seconds of a run, or a dash."""
    found = [r for r in runs if (r["ranks"], r["batch"]) == (ranks, batch) and (r["way"] == way or ranks == 1)]
    return f"{100 * found[-1]['accuracy']:.1f}% · {found[-1]['seconds']:.1f}" if found else NONE


def by_batch(runs: Runs, iterations: int) -> tuple[list[str], list[list[str]]]:
    """Batches on two ranks."""
    device = runs[0]["device"]
    theirs = {r.batch: r for r in published.ROWS if r.device == device}
    rows: list[list[str]] = []
    for batch in sorted({r["batch"] for r in runs if r["ranks"] == 2}):
        row = theirs.get(batch)
        told = f"{row.accuracy:g}% · {row.seconds:g}{' (failed)' if row.failed else ''}" if row else NONE
        rows.append([str(batch), told, *(cell(runs, way, 2, batch) for way in WAYS[:3])])
    return ["batch, 2 ranks", f"document, {published.ITERATIONS:,} iterations", *WAYS[:3]], rows


def by_ranks(runs: Runs) -> tuple[list[str], list[list[str]]]:
    """Numbers of ranks at the batch at which there is one rank."""
    batch = next((r["batch"] for r in runs if r["ranks"] == 1), 200)
    device = runs[0]["device"]
    theirs = {r.ranks: r for r in published.RANKS if r.device == device and r.batch == batch}
    rows: list[list[str]] = []
    for ranks in sorted({r["ranks"] for r in runs if r["batch"] == batch}):
        told = f"{theirs[ranks].accuracy:g}% · {theirs[ranks].seconds:g}" if ranks in theirs else NONE
        rows.append([str(ranks), told, *(cell(runs, way, ranks, batch) for way in WAYS)])
    return [f"ranks, batch {batch}", f"document, {published.ITERATIONS:,} iterations", *WAYS], rows


def conclusions(devices: Mapping[str, Runs], alone: Mapping[str, Runs]) -> str:
    """The document's three conclusions, by its own numbers and by ours; `alone`: those that ran by themselves."""
    rows: list[list[str]] = []
    for way in WAYS[:3]:
        for device, runs in devices.items():
            for iterations, width in settings(runs):
                mine = [r for r in runs if (r["iterations"], r["width"]) == (iterations, width)]
                rows += linear_rows(mine, way, f"{device}, width {width}, {iterations:,} iterations")
    for device in ("cuda", "cpu"):
        points = [(r.batch, r.seconds, r.accuracy / 100) for r in published.ROWS if r.device == device and not r.failed]
        rows.append([f"document, {device}", f"{published.ITERATIONS:,} iterations", *fitted(points)])
    head = ["way", "device", "batches", "seconds ≈ a + b · batch", "r²", "seconds, largest ÷ smallest batch"]
    head += ["accuracy, smallest to largest batch", "largest batch − half of it"]
    parts = ["Time over batch, and accuracy over batch, on two ranks:", markdown(head, rows), gains_text(alone)]
    return "\n\n".join(parts)


def linear_rows(runs: Runs, way: str, where: str) -> list[list[str]]:
    """The fit of one way on one device; nothing where fewer than three batches were measured."""
    mine = sorted((r for r in runs if r["way"] == way and r["ranks"] == 2), key=lambda r: r["batch"])
    points = [(r["batch"], r["seconds"], r["accuracy"]) for r in mine]
    return [[way, where, *fitted(points)]] if len(points) > 2 else []


def fitted(points: Sequence[tuple[int, float, float]]) -> list[str]:
    """The line through batch and seconds, how well it fits, and how accuracy grows."""
    batches, seconds, accuracies = zip(*points, strict=True)
    slope, start = statistics.linear_regression(batches, seconds)
    r2 = statistics.correlation(batches, seconds) ** 2
    return [
        f"{batches[0]} to {batches[-1]}",
        f"{start:.3g} + {slope:.3g} · batch",
        f"{r2:.4f}",
        f"{seconds[-1] / seconds[0]:.1f} ({batches[-1] / batches[0]:g}× the images)",
        " → ".join(f"{100 * a:.0f}%" for a in accuracies),
        f"{100 * (accuracies[-1] - accuracies[-2]):+.1f} points",
    ]


def gains_text(devices: Mapping[str, Runs]) -> str:
    """How much faster an iteration is on the GPU, in the document and here, where both were measured."""
    theirs = published.gains()
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    each = {
        (device, r["way"], r["width"], r["batch"]): r["seconds"] / r["iterations"]
        for device, runs in devices.items()
        for r in runs
        if r["ranks"] == 2
    }
    for (device, way, width, batch), seconds in each.items():
        if device == "cpu" and ("cuda", way, width, batch) in each:
            found.setdefault((way, width), []).append((batch, seconds / each["cuda", way, width, batch]))
    text = (
        f"GPU gain: the document says {published.GAIN}×; its own tables give "
        + ", ".join(f"{gain:.0f}× at batch {batch}" for batch, gain in theirs.items())
        + ", and more only compared with the run that failed."
    )
    for (way, width), pairs in found.items():
        text += f" Here, {way}, width {width}: " + ", ".join(f"{g:.1f}× at batch {b}" for b, g in sorted(pairs)) + "."
    return text if found else text + " Here nothing was measured on both devices at the same width yet."
