"""A picture of two test images: what is there, what is asked, and what each model says."""

from __future__ import annotations

from typing import Any

import torch
from harness.plots import pyplot
from torch import Tensor

from context.cases import Arm
from context.grid import TEST, pictured, unpacked
from context.scene import Question, scenes
from context.summary import Summary, Way

PALETTE = torch.tensor([[250, 246, 248], [190, 40, 40], [40, 70, 190]], dtype=torch.uint8)


def shown(summary: Summary) -> tuple[Tensor, Tensor]:
    """The two test images that are pictured, and their answers to all questions at half the resolution."""
    settings = summary.settings
    # The same places as on any device, the same colours; only the noise of the pixels is this device's.
    scene = scenes(settings.test, settings.size, TEST, torch.device("cpu"))
    picks = pictured(scene)
    return scene.image[picks], scene.answers[picks][..., ::2, ::2]


def predictions(summary: Summary, arm: Arm, way: Way) -> Tensor:
    """What one seed's model said of the two images, at half the resolution."""
    record = next(r for r in summary.of(arm) if "pictures" in r)
    return unpacked(record["pictures"][way], summary.settings.size)


def of_predictions(summary: Summary, question: Question, number: int) -> Any:
    """Two images: each with its answers, and the answers of every arm of the largest model."""
    images, answers = shown(summary)
    panels = [("image", images), ("truth", PALETTE[answers[:, number].long()])]
    for patch in summary.settings.patches:
        arm = Arm(question, summary.settings.deepest, patch)
        for way in summary.ways(arm):
            name = "trained on whole images" if patch == summary.settings.size else f"patch {patch}, run {PHRASES[way]}"
            panels.append((name, PALETTE[predictions(summary, arm, way).long()]))
    columns = -(-len(panels) // 2)
    figure, axes = pyplot().subplots(4, columns, figsize=(2.2 * columns, 9.6))
    for row in range(2):
        for place, (name, pictures) in enumerate(panels):
            axis = axes[2 * row + place // columns][place % columns]
            axis.imshow(pictures[row].numpy())
            axis.set_title(name, fontsize=8)
    for axis in axes.flat:
        axis.axis("off")
    return figure


PHRASES: dict[Way, str] = {"tiles": "on tiles", "whole": "whole"}
