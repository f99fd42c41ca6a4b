"""The table and the figure of windows, from their results, into README.md between the marks."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from harness.plots import pyplot, save
from harness.tables import NONE, markdown, ms, place

OTHERS = ("tifffile", "rasterio", "openslide", "zarr-python", "nibabel")
HEAD = (
    "format",
    "window, ms",
    "one thread, ms",
    "decoded ÷ window",
    "whole file, ms",
    "whole ÷ window",
    "others, window, ms",
)
COLOURS = {"mural": "#2f5d8a", "whole": "#e39b2d"}


def spread(seconds: list[float]) -> str:
    """The median in milliseconds, with the quartiles behind it."""
    if len(seconds) < 2:
        return ms(seconds)
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return f"{ms(seconds)} ({ms([low])} to {ms([high])})"


def row(title: str, found: dict[str, Any], results: dict[str, Any]) -> tuple[str, ...]:
    """A format's row of the table."""
    seconds = found["seconds"]
    ratio = median(found["whole"]) / median(seconds["mural"])
    others = ", ".join(f"{name} {ms(seconds[name])}" for name in OTHERS if name in seconds)
    windowed = found["windowed"]
    return (
        title,
        spread(seconds["mural"]) if windowed else NONE,
        ms(seconds["mural, one thread"]) if windowed else NONE,
        f"{found['decoded'] / results['box_bytes']:.2f}",
        ms(found["whole"]),
        f"**{ratio:.1f}**" if windowed else NONE,
        others or NONE,
    )


def line(title: str, found: dict[str, Any], results: dict[str, Any]) -> str:
    """A format's row, to print."""
    return "  ".join(f"{head}: {cell}" for head, cell in zip(HEAD, row(title, found, results), strict=True))


def caption(results: dict[str, Any]) -> str:
    """Where and how the numbers came about."""
    at, settings = results["machine"], results["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return (
        f"{settings['size']}² RGB ({results['image_bytes'] / 1e6:.0f} MB), tiles of {settings['tile']}², "
        f"{settings['windows']} windows of {settings['window']}² at places that no tile begins at "
        f"({results['box_bytes'] / 1e6:.2f} MB each), whole files {settings['wholes']} times, files in the page cache. "
        f"Medians, with the quartiles in parentheses. {at['cpu']}, {at['cores']} cores, "
        f"load {at['load_at_start']:.1f} at the start, Python {at['python']}, {versions}; commit {at['commit']}, "
        f"{results['date'][:10]}. Command: `{results['command']}`."
    )


def figure(results: dict[str, Any], path: Path) -> None:
    """Bars of a window and of a whole file for every format that has windows."""
    plt = pyplot()
    shown = {title: found for title, found in results["formats"].items() if found["windowed"]}
    drawn, axes = plt.subplots(figsize=(7, 0.45 * len(shown) + 1.2))
    for index, found in enumerate(shown.values()):
        times = {"mural": found["seconds"]["mural"], "whole": found["whole"]}
        for offset, (name, values) in zip((0.2, -0.2), times.items(), strict=True):
            axes.barh(index + offset, 1000 * median(values), 0.38, color=COLOURS[name])
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds, median")
    bars = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    window = f"a window of {results['settings']['window']}² (mural)"
    axes.legend(
        bars, [window, "the whole file, and the window out of it"], loc="upper center", bbox_to_anchor=(0.4, -0.18)
    )
    axes.grid(False, axis="y")
    save(drawn, path)


def write(folder: Path, source: Path) -> None:
    """Put the table into the page, and draw the figure."""
    if not source.is_file():
        raise SystemExit(f"{source.name} does not exist: run the benchmark first, or name its file with --output")
    results = json.loads(source.read_text())
    rows = [row(title, found, results) for title, found in results["formats"].items()]
    figure(results, folder / "figures" / "windows.svg")
    place(folder / "README.md", "windows", f"{caption(results)}\n\n{markdown(HEAD, rows)}")
