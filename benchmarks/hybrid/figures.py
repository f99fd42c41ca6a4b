"""The figures: sizes of layers, and training over batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.plots import PUBLISHED_COLOUR, pyplot, save
from harness.results import Record
from published import ITERATIONS, Row

COLOURS = {"data": "#2f5d8a", "model": "#3c9d9b", "hybrid": "#e39b2d"}


def draw_sizes(records: Sequence[Record], path: Path) -> None:
    """Parameters and kept values of every layer, each beside the first layer's, as the document draws them."""
    plt = pyplot()
    figure, axes = plt.subplots(2, len(records), figsize=(4 * len(records), 5.6), squeeze=False)
    for column, record in enumerate(records):
        layers = record["layers"]
        labels = [f"{'FC' if row['type'] == 'Linear' else 'conv'} {n + 1}" for n, row in enumerate(layers)]
        places = list(range(len(layers)))
        for line, (key, words, colour) in enumerate(
            (("parameters", "model", COLOURS["hybrid"]), ("kept", "data", COLOURS["data"]))
        ):
            values = [row[key] for row in layers]
            axes[0][column].bar([p - 0.2 + 0.4 * line for p in places], values, 0.4, color=colour, label=words)
            axes[1][column].plot(places, [v / values[0] for v in values], color=colour, marker=".", label=words)
        for axis in (axes[0][column], axes[1][column]):
            axis.set_yscale("log")
            axis.set_axisbelow(True)
            axis.set_xticks(places, labels, rotation=90)
        axes[0][column].set_title(record["words"], fontsize=9)
    axes[0][0].set_ylabel("parameters; values kept of an image")
    axes[1][0].set_ylabel("÷ the first layer's")
    axes[0][0].legend(frameon=False)
    save(figure, path)


def draw_training(devices: Mapping[str, Sequence[Record]], rows: Sequence[Row], path: Path) -> None:
    """Seconds of an iteration and accuracy over batch size on two ranks; the document's points are open."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for device, runs in devices.items():
        dashes = {"cpu": "-", "cuda": "--"}.get(device, "-.")
        for iterations, width in sorted({(r["iterations"], r["width"]) for r in runs}):
            for way, colour in COLOURS.items():
                mine = sorted(
                    (r for r in runs if r["way"] == way and r["ranks"] == 2 and r["width"] == width
                     and r["iterations"] == iterations),
                    key=lambda r: r["batch"],
                )  # fmt: skip
                x, label = [r["batch"] for r in mine], f"{way}, {device}, width {width}, {iterations:,} it."
                axes[0].plot(
                    x, [r["seconds"] / iterations for r in mine], dashes, color=colour, marker=".", label=label
                )
                axes[1].plot(x, [100 * r["accuracy"] for r in mine], dashes, color=colour, marker=".", label=label)
    for device, marker in (("cpu", "o"), ("cuda", "s")):
        mine = [r for r in rows if r.device == device]
        label = f"document, {device}, {ITERATIONS:,} it."
        x, style = [r.batch for r in mine], {"color": PUBLISHED_COLOUR, "mfc": "none", "ls": ":", "marker": marker}
        axes[0].plot(x, [r.seconds / ITERATIONS for r in mine], label=label, **style)
        axes[1].plot(x, [r.accuracy for r in mine], label=label, **style)
    axes[0].set_xscale("log")
    axes[0].set_yscale("log")
    axes[1].set_xscale("log")
    axes[0].set_xlabel("batch, 2 ranks")
    axes[1].set_xlabel("batch, 2 ranks")
    axes[0].set_ylabel("seconds of an iteration")
    axes[1].set_ylabel("accuracy, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    save(figure, path)
