"""Cases in which streamed steps were once wrong: each says what it was."""

from __future__ import annotations

import pytest
import torch

import mural
from streamed_law import Case, check_steps, images
from streamed_losses import IGNORED, LOSSES
from streamed_models import Spec
from streamed_oddities import Supervised, supervise


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


def test_losses_whose_totals_are_known_after_different_passes() -> None:
    """Gradients of totals that the loss itself gave were scaled along with those of the last pass: all were wrong."""
    torch.manual_seed(1)
    x, mask, label = images(2, (26, 31), 1)[0], torch.randint(0, 3, (2, 26, 31)), torch.randint(0, 2, (2,))
    check_steps(Supervised().double(), supervise, [(x, {"mask": mask, "label": label})], mural.Plan(stream=(12, 10)))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_losses_with_one_number_for_each_image(norm: str) -> None:
    """Each image has a gradient of its own, but one was taken for all, and none was found: gradients were 0."""
    Case(Spec(norm=norm), (20, 22), (8, 9), "per image", count=3).check()


@pytest.mark.parametrize("keep", [None, "none"])
def test_merged_dims(keep: str | None) -> None:
    """Merged dims of the image, as losses do it with `view(n, c, -1)`, had the extents of other dims."""
    Case(Spec(norm="batch"), (20, 22), (8, 9), "flat", count=2, keep=keep).check()
