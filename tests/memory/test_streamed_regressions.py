"""Cases in which streamed steps were once wrong: each says what it was."""

from __future__ import annotations

import pytest
import torch

import mural
from streamed_law import Case, check_steps, images
from streamed_losses import IGNORED, LOSSES
from streamed_models import Spec


def test_norm_of_which_a_pass_needs_less_than_its_own_part() -> None:
    """An odd image that is halved is not needed whole by passes that do not measure it: norms asked for all of it."""
    spec = Spec(block="residual", norm="batch", up="transposed 3")
    Case(spec, (25, 27), (12, 12), "mse", keep="none", count=2).check()


def test_tile_without_outputs() -> None:
    """Tiles at the end of a small image have no positions at low resolution: convolutions of nothing failed."""
    spec = Spec(dims=3, block="squeeze", norm="group", down="max ceil", up="size", padding="reflect")
    Case(spec, (11, 7, 6), (12, 12, 5), "bce", keep="none").check()


@pytest.mark.parametrize("loss", ["ignoring", "weighted"])
@pytest.mark.parametrize("head", ["pixels", "classes"])
def test_nothing_counts(loss: str, head: str) -> None:
    """Where all positions are ignored, torch's gradients are 0; streamed ones were not a number."""
    x = images(2, (20, 20), 1)[0]
    target = torch.full((2, 20, 20) if head == "pixels" else (2,), IGNORED)
    check_steps(Spec(head=head).build(), LOSSES[loss], [(x, target)], mural.Plan(stream=(8, 8)))
