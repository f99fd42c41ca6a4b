"""Losses of MONAI that index with lists of slices. Ranks take seconds to import MONAI."""

from __future__ import annotations

import pytest
from monai.losses import BendingEnergyLoss, DiffusionLoss
from torch import nn

from law import Grid, holds, image

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("grid", [Grid((2, 2)), Grid((1, 2), data=2), Grid((2, 1), cuts=((3, 10),))], ids=str)
@pytest.mark.parametrize("loss", [BendingEnergyLoss(), BendingEnergyLoss(normalize=True), DiffusionLoss()], ids=repr)
def test_monai_losses_that_index_with_lists(loss: nn.Module, grid: Grid) -> None:
    holds(loss, image(2, 2, 13, 11), grid)


@pytest.mark.parametrize("loss", [BendingEnergyLoss(), DiffusionLoss(normalize=True, reduction="sum")], ids=repr)
def test_monai_losses_in_3d(loss: nn.Module) -> None:
    holds(loss, image(1, 3, 7, 6, 9), Grid((2, 1, 2)))
