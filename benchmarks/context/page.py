"""The page: tables from results/gpu.json between the marks of README.md, and the figures beside it."""

from __future__ import annotations

from pathlib import Path

from harness.plots import save
from harness.results import read
from harness.tables import NONE, environment, markdown, place

from context import figures, picture
from context.cases import Arm
from context.scene import QUESTIONS
from context.summary import Summary


def write(folder: Path) -> None:
    """Rewrite the page and its figures from the results that are there."""
    records = read(folder / "results" / "gpu.json")
    summary, target = Summary(records), folder / "figures"
    deepest = summary.settings.deepest
    save(figures.of_patches(summary), target / "patches.svg")
    save(figures.of_distance(summary, deepest), target / "distance.svg")
    save(figures.of_losses(summary, "hilum", deepest), target / "losses.svg")
    for question in QUESTIONS:
        if question != "own" and (question, deepest) in {(arm.question, arm.depth) for arm in summary.settings.arms}:
            drawn = picture.of_predictions(summary, question, QUESTIONS.index(question))
            save(drawn, target / f"{question}.png")
    readme = folder / "README.md"
    place(readme, "where", environment(records))
    place(readme, "accuracy", accuracy_table(summary))
    place(readme, "distance", distance_table(summary, deepest))
    place(readme, "ranks", ranks_table(summary))


def patch_name(summary: Summary, patch: int) -> str:
    """A patch in words."""
    division = summary.settings.size // patch
    return "**whole image**" if division == 1 else f"{patch}² (1/{division})"


def accuracy_table(summary: Summary) -> str:
    """Every arm: accuracies over the seeds run on tiles and run whole, what could be known, and the IoU."""
    rows: list[list[str]] = []
    for arm in summary.settings.arms:
        tiled = str(summary.scores(arm, "tiles")) if "tiles" in summary.ways(arm) else NONE
        bounds = [summary.bound(a)["accuracy"] for a in (arm, summary.whole(arm))]
        overlap = [f"{summary.scores(arm, way, 'iou').mean:.3f}" for way in summary.ways(arm)]
        rows.append([
            arm.question, str(summary.facts["reach"][str(arm.depth)]), patch_name(summary, arm.patch),
            f"{summary.rates[arm]:g}", tiled, NONE if tiled == NONE else f"{bounds[0]:.3f}",
            str(summary.scores(arm, "whole")), f"{bounds[1]:.3f}", " / ".join(overlap),
        ])  # fmt: skip
    head = [
        "question", "reach, pixels", "trained on", "rate", "run on tiles", "most that tiles tell", "run whole",
        "most that the reach tells", "mean IoU (tiles / whole)",
    ]  # fmt: skip
    return markdown(head, rows)


def distance_table(summary: Summary, depth: int) -> str:
    """The hilum by distance: medians of the seeds, for each patch, beside what could be known."""
    rows: list[list[str]] = []
    for patch in summary.settings.patches:
        arm = Arm("hilum", depth, patch)
        for way in summary.ways(arm):
            bound = summary.bound(arm if way == "tiles" else summary.whole(arm))["by_distance"]
            found = zip(summary.by_distance(arm, way), bound, strict=True)
            cells = [NONE if s is None else f"{s.median:.2f} of {most:.2f}" for s, most in found]
            rows.append([patch_name(summary, patch), picture.PHRASES[way], *cells])
    return markdown(["trained on", "run", *(f"{name} pixels" for name in figures.names_of(summary))], rows)


def ranks_table(summary: Summary) -> str:
    """The same training on several ranks: how far its losses and parameters are from plain torch's."""
    curves = [r for r in summary.records if r["kind"] == "curve"]
    rows = [
        [
            r["name"], f"{r['losses'][0]:.6f}", f"{r['losses'][-1]:.6f}",
            f"{r['difference']:.0e}" if "difference" in r else "the reference",
            f"{r['parameters']:.0e}" if "parameters" in r else NONE,
        ]
        for r in curves
    ]  # fmt: skip
    steps = curves[0]["steps"] if curves else 0
    differences = [f"largest difference of a loss in {steps} steps", "of a parameter at the end"]
    return markdown(["ranks", "first loss", "last loss", *differences], rows)
