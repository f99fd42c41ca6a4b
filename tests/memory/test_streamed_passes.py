"""Passes in which streamed steps were once wrong: what they compute, keep and wait for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from streamed_law import check_steps, images
from streamed_losses import IGNORED, LOSSES, both
from streamed_models import Spec
from streamed_oddities import Flat, Siamese, Tokens, TwoHeads


@pytest.mark.parametrize("keep", [None, "none"])
def test_norm_that_is_called_first_on_what_is_known_last(keep: str | None) -> None:
    """A norm waited for the running buffers of its other call, whose input was not known yet."""
    torch.manual_seed(1)
    batches = [(x, torch.randint(0, 3, (2, 26, 31))) for x in images(2, (26, 31))]
    check_steps(Siamese().double(), both, batches, mural.Plan(stream=(12, 10)), keep)


@pytest.mark.parametrize("keep", [None, "none"])
def test_parameters_and_constants_of_whole_passes(keep: str | None) -> None:
    """What a pass on whole tensors computes from parameters alone, or makes itself, was looked for among tiles."""
    torch.manual_seed(1)
    batches = [(x, torch.randint(0, 3, (2,))) for x in images(2, (26, 31))]
    for model, loss in ((Tokens(9), F.cross_entropy), (Flat(), LOSSES["weighted"]), (TwoHeads(True), F.cross_entropy)):
        check_steps(model.double(), loss, batches, mural.Plan(stream=(12, 10)), keep)


class Balanced(nn.Module):
    """A part that sees the whole tensor, and the mean of all images."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return F.interpolate(self.two(F.avg_pool2d(x, 4)).relu() * x.mean().exp(), x.shape[2:])


@pytest.mark.parametrize("keep", [None, "none", "host"])
def test_mean_of_all_images_for_a_whole_part(keep: str | None) -> None:
    """It failed without saying why, and was then refused."""
    torch.manual_seed(1)
    batches = [(x, torch.randint(0, 3, (2, 24, 24))) for x in images(2, (24, 24))]
    check_steps(Balanced().double(), both, batches, mural.Plan(stream=(12, 10)), keep)


@pytest.mark.parametrize("head", ["pixels", "classes"])
@pytest.mark.parametrize("keep", [None, "all", "host"])
def test_nothing_counts_after_norms(head: str, keep: str | None) -> None:
    """Gradients of kept values were scaled by 0, and what was added to them divided by it."""
    x = images(2, (20, 20), 1)[0]
    target = torch.full((2, 20, 20) if head == "pixels" else (2,), IGNORED)
    check_steps(
        Spec(head=head, norm="batch").build(), LOSSES["ignoring"], [(x, target)], mural.Plan(stream=(8, 8)), keep
    )
