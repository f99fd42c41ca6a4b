"""Values that are written in place: each pass sees them as torch would, or the step is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from streamed_law import check_steps, images


def prediction(function: Callable[[Tensor], Tensor]) -> None:
    """Check the result of a model."""
    model, x = Recomposed(function).double(), images(2, (26, 30), 1)[0]
    pm = mural.parallelize(model, mural.Plan(stream=(8, 8)), loss=F.cross_entropy)
    with torch.no_grad():
        torch.testing.assert_close(pm(x).full(), model(x), rtol=1e-10, atol=1e-10)


class Recomposed(nn.Module):
    """A function of the results of a convolution."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(2, 3, 3, padding=1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


def kept_and_written(x: Tensor) -> Tensor:
    low = F.avg_pool2d(x, 4)
    other = low.flip(2)
    low.mul_(2)
    return x * low.mean((2, 3), keepdim=True) + F.interpolate(low, x.shape[2:]) + F.interpolate(other, x.shape[2:])


def whole_and_written(x: Tensor) -> Tensor:
    low = F.avg_pool2d(x, 4).flip(2)
    before = F.interpolate(low, x.shape[2:])
    low += 1
    return x + before * F.interpolate(low, x.shape[2:])


def total_and_written(x: Tensor) -> Tensor:
    y = x * 1
    part = y[:, :2]
    y.add_(part.mean((1, 2, 3), keepdim=True))
    return y * part.mean((1, 2, 3), keepdim=True)


@pytest.mark.parametrize("keep", [None, "host"])
@pytest.mark.parametrize("function", [kept_and_written, whole_and_written, total_and_written])
def test_values_that_are_written_in_place_later(function: Callable[[Tensor], Tensor], keep: str | None) -> None:
    """Other passes read a value as it was after, or a total was measured before a write that needs another total."""
    torch.manual_seed(1)
    batches = [(x, torch.randint(0, 3, (2, 26, 31))) for x in images(2, (26, 31))]
    check_steps(Recomposed(function).double(), F.cross_entropy, batches, mural.Plan(stream=(12, 10)), keep)


def norm_and_written(x: Tensor) -> Tensor:
    y = x * 1
    norm = F.instance_norm(y)
    return norm + y.mul_(2).mean((2, 3), keepdim=True) * y


def variance_and_written(x: Tensor) -> Tensor:
    y = x * 1
    variance = y.var((2, 3), keepdim=True)
    return variance + y.mul_(2).mean((2, 3), keepdim=True) * y


@pytest.mark.parametrize("function", [norm_and_written, variance_and_written])
def test_norms_of_what_is_written_in_place_later(function: Callable[[Tensor], Tensor]) -> None:
    """They measured it as it was when the tile had ended."""
    prediction(function)


def kept_view(x: Tensor) -> Tensor:
    low = F.avg_pool2d(x, 4)
    part = low[:, :2]
    other = part.flip(2)
    low.mul_(2)
    return x.sum(1, keepdim=True) + F.interpolate(torch.cat([part, other], 1), x.shape[2:])


def written_before(x: Tensor) -> Tensor:
    low = F.avg_pool2d(x, 4) + 0
    low[:, :2].mul_(2)
    return x + F.interpolate(low.flip(2), x.shape[2:])


def written_between(x: Tensor) -> Tensor:
    low = F.avg_pool2d(x, 4) + 0
    low[:, :, 2:5].mul_(2)
    return x + F.interpolate(low, x.shape[2:])


@pytest.mark.parametrize("function", [kept_view, written_before, written_between])
def test_writes_that_another_pass_does_not_see(function: Callable[[Tensor], Tensor]) -> None:
    """They were lost."""
    pm = mural.parallelize(Recomposed(function).double(), mural.Plan(stream=(12, 10)), loss=F.cross_entropy)
    with pytest.raises(mural.UnsupportedOp, match="mul_ at 'model/mul_:1' writes in place"):
        pm.step(images(1, (26, 30), 1)[0], torch.zeros(1, 26, 30).long())


def assigned(x: Tensor) -> Tensor:
    x = x + 0
    x[:, :, 2:5] = 1
    return x


def test_assignment_to_a_part_of_the_image() -> None:
    """It returns nothing, which was an internal error, and then refused."""
    prediction(assigned)
