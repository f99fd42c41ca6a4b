"""Curves over the steps of a run: charts one below the other on one axis of steps, with the best point marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, log10
from typing import Any

from mural.report import plots

HEIGHT, TOP = 230, 40
MOST = 2000
"""Points of a curve that are drawn."""
FEW = 12
"""Points from which on a curve is smoothed."""
STEEP, VERY_STEEP = 1.5, 4.0
"""Powers of ten from the smallest value to the largest, from which on an axis may be logarithmic, and has few ticks."""


@dataclass(frozen=True)
class Curve:
    """Values by step; with `noisy`, they are drawn lightly, and their moving mean over them."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    colour: str
    noisy: bool = False


@dataclass(frozen=True)
class CurveChart:
    """Some curves with one axis of values; `best` is a step and a value. With `steep`, it may be logarithmic."""

    title: str
    curves: Sequence[Curve]
    best: tuple[int, float] | None = None
    steep: bool = False


def html(charts: Sequence[CurveChart], marked: Sequence[int] = ()) -> str:
    """The charts as a part of a page that has `plots.script()`; lines stand at the steps that are marked."""
    figure = plots.stacked([chart.title for chart in charts], [HEIGHT] * len(charts), "step", TOP)
    for row, chart in enumerate(charts, start=1):
        place: dict[str, Any] = {"row": row, "col": 1, "legend": "legend" + str(row) * (row > 1)}
        for curve in chart.curves:
            add_curve(figure, curve, place)
        if chart.best is not None:
            step, value = chart.best
            star = {"symbol": "star", "size": 14, "color": "#ffb000", "line": {"width": 1, "color": plots.GREY}}
            words = {"name": f"best (step {step})", "text": f"best: {value:.4g} after step {step}", "hoverinfo": "text"}
            figure.add_scatter(x=[step], y=[value], mode="markers", marker=star, **words, **place)
        figure.update_layout({place["legend"]: legend(row, len(charts))})
        figure.update_yaxes(row=row, gridcolor=plots.GRID, zeroline=False)
        if chart.steep and (powers := decades(chart)) > STEEP:
            figure.update_yaxes(row=row, type="log", tickformat=".3~g", dtick=1 if powers > VERY_STEEP else "D2")
    for step in marked:
        figure.add_vline(x=step, line={"color": plots.GREY, "dash": "dot", "width": 1})
    if max(step for chart in charts for curve in chart.curves for step in curve.steps) < FEW:
        figure.update_xaxes(dtick=1)
    figure.update_layout(hovermode="closest")
    return plots.html(figure)


def add_curve(figure: Any, curve: Curve, place: dict[str, Any]) -> None:
    """Draw a curve, and the smoothed one over it where there are enough points."""
    steps, values = thinned(curve.steps, curve.values)
    said = {"hovertemplate": f"{curve.name}: %{{y:.4g}}, step %{{x}}<extra></extra>", "legendgroup": curve.name}
    rough = curve.noisy and len(curve.values) >= FEW
    look: dict[str, Any] = {"mode": "lines" if len(steps) > FEW else "lines+markers", "marker": {"size": 6}}
    thin = {"color": curve.colour, "width": 1 if rough else 2}
    figure.add_scatter(
        x=steps, y=values, name=curve.name, line=thin, opacity=0.5 if rough else 1.0, showlegend=not rough,
        **look, **said, **place,
    )  # fmt: skip
    if rough:
        steps, values = thinned(curve.steps, smoothed(curve.values))
        thick = {"color": curve.colour, "width": 2.5}
        figure.add_scatter(x=steps, y=values, name=f"{curve.name}, smoothed", mode="lines", line=thick, **said, **place)


def legend(row: int, rows: int) -> dict[str, Any]:
    """The legend of one of several charts, at its upper right."""
    inside = rows * HEIGHT + (rows - 1) * plots.HEAD
    return {
        "orientation": "v",
        "x": 1.01,
        "y": 1 - (row - 1) * (HEIGHT + plots.HEAD) / inside,
        "yanchor": "top",
        "traceorder": "normal",
        "font": {"size": 12},
    }


def smoothed(values: Sequence[float], reach: int = 0) -> list[float]:
    """The mean of the values up to `reach` places away from each; by default, a fortieth of them to each side.

    Near the ends it reaches less far, to both sides alike.

    >>> smoothed([0, 0, 3, 0, 0], 1)
    [0.0, 1.0, 1.0, 1.0, 0.0]
    """
    reach = reach or max(2, len(values) // 40)
    known = [isfinite(value) for value in values]
    sums = [0.0, *accumulate(value if good else 0.0 for value, good in zip(values, known, strict=True))]
    counts = [0, *accumulate(known)]
    found: list[float] = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)
        first, last = place - near, place + near + 1
        count = counts[last] - counts[first]
        found.append((sums[last] - sums[first]) / count if count else float("nan"))
    return found


def thinned(steps: Sequence[int], values: Sequence[float], most: int = MOST) -> tuple[list[int], list[float]]:
    """At most about so many of the points: of each stretch, the lowest and the highest.

    >>> thinned(range(8), [1, 5, 0, 1, 1, 1, 9, 1], most=4)
    ([1, 2, 4, 6], [5, 0, 1, 9])
    """
    if len(steps) <= most:
        return list(steps), list(values)
    width = -(-2 * len(steps) // most)
    kept: list[int] = []
    for start in range(0, len(steps), width):
        stretch = range(start, min(start + width, len(steps)))
        ends = {min(stretch, key=lambda i: values[i]), max(stretch, key=lambda i: values[i])}
        kept += sorted(ends)
    return [steps[i] for i in kept], [values[i] for i in kept]


def decades(chart: CurveChart) -> float:
    """The powers of ten from the smallest value of a chart to the largest; 0 if one of them is not above 0.

    >>> decades(CurveChart("loss", [Curve("training", [1, 2], [10.0, 0.01], "red")]))
    3.0
    """
    values = [value for curve in chart.curves for value in curve.values if isfinite(value)]
    return log10(max(values)) - log10(min(values)) if values and min(values) > 0 else 0.0
