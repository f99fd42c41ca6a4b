"""Calls that need a total over all tiles, and then every tile again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from law import image
from streamed_law import check_steps, images

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms norm of images": lambda y: F.rms_norm(y, list(y.shape[1:])),
    "unit length of channels": lambda y: F.normalize(y, dim=(2, 3)),  # type: ignore[arg-type]
    "unit sum of images": lambda y: F.normalize(y, 1.0, (1, 2, 3)),  # type: ignore[arg-type]
}


class Called(nn.Module):
    """A layer, and a call of its result."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.layer = name, nn.Conv2d(2, 4, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        return CALLS[self.name](self.layer(x))


def cubes(result: Tensor, target: Tensor) -> Tensor:
    """A loss that sees each position's value."""
    return (result * result * result + result * 0.5).mean()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_divides_by_its_own_total(name: str) -> None:
    """The pass that knew the total gave the call no tile to divide: loss and gradients were those of an empty image."""
    batches = [(x, image(2, 1, 8, 6)) for x in images(2, (8, 6))]
    check_steps(Called(name), cubes, batches, mural.Plan(stream=(4, 3)))


class Empty(Called):
    """A model whose result has no channels."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, :0]


def test_a_result_without_channels() -> None:
    """The mean's gradient was guessed from its positions for each channel: a division by zero."""
    parallel = mural.parallelize(Empty("none"), mural.Plan(stream=(4, 3)), loss=cubes)
    (x,) = images(2, (8, 6), 1)
    assert parallel.step(x, x).isnan()
