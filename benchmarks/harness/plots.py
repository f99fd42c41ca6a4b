"""One look for all figures: SVG files that do not change when the numbers do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# From dark to light: more ranks are lighter. Published points are open, in one colour.
RANK_COLOURS = {1: "#1b1b3a", 2: "#2f5d8a", 4: "#3c9d9b", 8: "#e39b2d"}
PUBLISHED_COLOUR = "#b3261e"
STYLE = {
    "svg.hashsalt": "mural",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "figure.constrained_layout.use": True,
}


def pyplot() -> Any:
    """The pyplot of matplotlib, set up; it is an optional package."""
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit('the figures need matplotlib: pip install "mural-train[bench]"') from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    plt.rcParams.update(STYLE)
    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure; without a date, so that the file only changes with the numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot().close(figure)
