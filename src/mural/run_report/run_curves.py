"""The curves of a report: losses, scores of validations, and scores of each class, by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, cast

from mural.report import plots
from mural.report.class_maps import class_colours
from mural.report.curves import Curve, CurveChart
from mural.run_report.run_history import Line, RunHistory, scores_of


def charts(run: RunHistory) -> list[CurveChart]:
    """The charts of a run; those without values are left out."""
    train, seen = run.of("train"), run.of("validation")
    first, second, *_ = plots.PALETTE
    loss = [curve("training", train, "loss", first, noisy=True), curve("validation", seen, "loss", second)]
    lists = class_scores(seen)
    apart = tuple(f"{name}/" for name in lists)
    names = [name for name in scalar_scores(seen) if name != "loss" and not name.startswith(apart)]
    scores = [curve(name, seen, name, colour) for name, colour in zip(names, cycle(plots.PALETTE), strict=False)]
    found = [
        CurveChart("Loss", loss, star(run, lambda score: score == "loss"), steep=True),
        CurveChart("Scores of validations", scores, star(run, lambda score: score in names)),
    ]
    for name, most in lists.items():
        marked = star(run, lambda score, start=f"{name}/": score.startswith(start))
        found.append(CurveChart(f"{name} of each class", by_class(run, seen, name, most), marked))
    kept = [replace(chart, curves=[curve for curve in chart.curves if curve.steps]) for chart in found]
    return [chart for chart in kept if chart.curves]


def star(run: RunHistory, here: Callable[[str], bool]) -> tuple[int, float] | None:
    """The best validation, if its score is one of a chart's."""
    best = run.best
    return (best.step, best.value) if best is not None and here(best.score) else None


def curve(name: str, lines: Sequence[Line], key: str, colour: str, noisy: bool = False) -> Curve:
    """The values under a key, by step."""
    having = [line for line in lines if isinstance(line.get(key), (int, float))]
    return Curve(name, [line["step"] for line in having], [float(line[key]) for line in having], colour, noisy)


def scalar_scores(lines: Sequence[Line]) -> list[str]:
    """The scores that are single numbers, in their order."""
    return list(dict.fromkeys(k for line in lines for k, v in scores_of(line).items() if isinstance(v, (int, float))))


def class_scores(lines: Sequence[Line]) -> dict[str, int]:
    """The scores that have one number for each class, and how many these are."""
    found: dict[str, int] = {}
    for line in lines:
        for key, value in scores_of(line).items():
            if isinstance(value, list):
                found[key] = max(found.get(key, 0), len(cast("list[Any]", value)))
    return found


def by_class(run: RunHistory, lines: Sequence[Line], key: str, most: int) -> list[Curve]:
    """A curve for each class."""
    having: list[Mapping[str, Any]] = [line for line in lines if len(line.get(key, ())) == most]
    steps, names = [line["step"] for line in having], class_names(run, most)
    return [
        Curve(name, steps, [float(line[key][number]) for line in having], colour)
        for number, (name, colour) in enumerate(zip(names, [plots.GREY, *class_colours(most)[1:]], strict=True))
    ]


def label_names(run: RunHistory, count: int) -> list[str]:
    """The names of so many labels, numbers where the configuration has none."""
    given = run.config.data.classes
    return list(given) if len(given) == count else [str(number) for number in range(count)]


def class_names(run: RunHistory, count: int) -> list[str]:
    """The names of so many classes, numbers where the configuration has none."""
    given = run.config.data.classes
    return list(given) if len(given) == count else [f"class {number}" for number in range(count)]
