"""The figures: accuracy against patch and against distance, and the loss while training."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from harness.plots import pyplot

from context.cases import Arm
from context.scene import Question
from context.summary import Scores, Summary

COLOURS = {2: "#e39b2d", 3: "#3c9d9b", 5: "#1b1b3a"}
PATCH_COLOURS = ("#1b1b3a", "#2f5d8a", "#3c9d9b", "#e39b2d", "#b3261e")
BOUND = "#888888"


def colour(depth: int) -> str:
    """The colour of a depth; one for all that are not of the table."""
    return COLOURS.get(depth, "#2f5d8a")


def dots(axis: Any, x: float, scores: Scores, shade: str) -> None:
    """Each seed as a dot."""
    axis.plot([x] * len(scores.values), scores.values, ".", color=shade, alpha=0.35, markersize=4)


def of_patches(summary: Summary) -> Any:
    """Accuracy against the patch, a panel for each question, a colour for each receptive field."""
    settings = summary.settings
    figure, axes = pyplot().subplots(1, len(settings.depths), figsize=(3.6 * len(settings.depths), 4.2), sharey=True)
    for axis, (question, depths) in zip(axes, settings.depths, strict=True):
        for shift, depth in enumerate(depths):
            of_depth(axis, summary, question, depth, shift)
        patches = sorted(settings.patches)
        axis.set_xscale("log", base=2)
        axis.set_xticks(patches, [str(p) for p in patches[:-1]] + [f"{patches[-1]}\n(whole)"])
        axis.set_title(question, loc="left")
        axis.set(xlabel="trained on patches of", ylim=(0.47, 1.0))
    axes[0].set_ylabel("balanced accuracy on nuclei, test images")
    figure.legend(handles=legend(summary), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def legend(summary: Summary) -> list[Any]:
    """What colours and lines mean: each once, for all panels."""
    line = pyplot().Line2D
    depths = sorted({arm.depth for arm in summary.settings.arms})
    reaches = [(depth, summary.facts["reach"][str(depth)]) for depth in depths]
    return [
        *(line([], [], color=colour(depth), linewidth=4, label=f"reach {reach} pixels") for depth, reach in reaches),
        line([], [], color=BOUND, marker="o", markersize=4, label="run on tiles, mean ± deviation"),
        line([], [], color=BOUND, linestyle="--", marker="s", markersize=3, label="run on the whole image"),
        line([], [], color=BOUND, linestyle=":", marker="_", label="the most that tiles can tell"),
    ]


def of_depth(axis: Any, summary: Summary, question: Question, depth: int, shift: int) -> None:
    """The lines of one depth: run on tiles, run on the whole image, and the bound."""
    arms = [Arm(question, depth, patch) for patch in sorted(summary.settings.patches)]
    tiled = [summary.scores(arm, summary.ways(arm)[0]) for arm in arms]
    whole = [summary.scores(arm, "whole").mean for arm in arms]
    xs = [arm.patch * (1 + 0.03 * shift) for arm in arms]
    shade = colour(depth)
    middle, deviation = [s.mean for s in tiled], [s.deviation for s in tiled]
    axis.errorbar(xs, middle, deviation, color=shade, capsize=2, marker="o", markersize=4)
    for x, scores in zip(xs, tiled, strict=True):
        dots(axis, x, scores, shade)
    axis.plot(xs, whole, "--", color=shade, marker="s", markersize=3)
    bounds = [summary.bound(arm)["accuracy"] for arm in arms]
    axis.plot(xs, bounds, ":", color=shade, marker="_", markersize=9)


def names_of(summary: Summary) -> list[str]:
    """The ranges of distance, in words."""
    edges = summary.facts["edges"]
    return [f"≤ {edges[0]}", *(f"{a + 1}–{b}" for a, b in pairwise(edges)), f"> {edges[-1]}"]


def of_distance(summary: Summary, depth: int) -> Any:
    """Accuracy on the hilum against the distance from it, a colour for each patch: medians, and a dot for each seed."""
    figure, axes = pyplot().subplots(1, 2, figsize=(8.4, 3.6), sharey=True)
    names = names_of(summary)
    for axis, on_tiles in zip(axes, (True, False), strict=True):
        for number, patch in enumerate(summary.settings.patches):
            arm, shade = Arm("hilum", depth, patch), PATCH_COLOURS[number]
            found = summary.by_distance(arm, summary.ways(arm)[0] if on_tiles else "whole")
            places = [(k + 0.06 * number, scores) for k, scores in enumerate(found) if scores is not None]
            axis.plot([x for x, _ in places], [s.median for _, s in places], "o-", color=shade, markersize=4)
            for x, scores in places:
                dots(axis, x, scores, shade)
            bound = [b for b in summary.bound(arm)["by_distance"] if b is not None]
            if on_tiles or arm == summary.whole(arm):
                axis.plot([x for x, _ in places], bound[: len(places)], ":", color=shade, linewidth=1)
        axis.set_xticks(range(len(names)), names)
        axis.set_title("run on tiles as large as the patch" if on_tiles else "run on the whole image", loc="left")
        axis.set(xlabel="distance of the nucleus from its hilum, pixels", ylim=(0.4, 1.03))
    axes[0].set_ylabel("balanced accuracy")
    labels = ["whole images" if p == summary.settings.size else f"patches of {p}" for p in summary.settings.patches]
    handles = [pyplot().Line2D([], [], color=c, marker="o") for c in PATCH_COLOURS[: len(labels)]]
    figure.legend(
        handles, [f"trained on {t}" for t in labels], loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    return figure


def of_losses(summary: Summary, question: Question, depth: int) -> Any:
    """The loss of every seed while training, a colour for each patch."""
    figure, axis = pyplot().subplots(figsize=(5.4, 3.4))
    for shade, patch in zip(PATCH_COLOURS, summary.settings.patches, strict=False):
        label = "whole image" if patch == summary.settings.size else f"patch {patch}"
        for number, record in enumerate(summary.of(Arm(question, depth, patch))):
            losses = record["losses"]
            steps = [(k + 0.5) * summary.settings.steps / len(losses) for k in range(len(losses))]
            axis.plot(steps, losses, color=shade, linewidth=1, label=None if number else label)
    axis.set(xlabel="step", ylabel="training loss", title=f"{question}, one line for each seed", yscale="log")
    axis.legend(frameon=False, fontsize=7)
    return figure
