"""Norms: statistics of the whole image (and batch), in training and eval, with equal buffers on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from law import Expr, Grid, holds, image, some

GRIDS = [Grid((2, 1)), Grid((2, 2)), Grid((3, 1), cuts=((1, 1, 10),)), Grid((1, 2), data=2), Grid((1,), data=3)]


def trained(norm: nn.Module) -> nn.Module:
    """A norm with random parameters and buffers."""
    generator = torch.Generator().manual_seed(2)
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
    return norm.double()


NORMS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch momentum None": lambda: nn.BatchNorm2d(4, momentum=None),
    "batch no affine": lambda: nn.BatchNorm2d(4, affine=False),
    "batch no buffers": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(4),
    "instance affine buffers": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 4),
    "group no affine": lambda: nn.GroupNorm(4, 4, affine=False),
    "layer over image": lambda: nn.LayerNorm((4, 12, 11)),
    "layer over rows": lambda: nn.LayerNorm((12, 11), bias=False),
    "layer over last": lambda: nn.LayerNorm(11),
    "layer no affine": lambda: nn.LayerNorm((12, 11), elementwise_affine=False),
}


@pytest.mark.parametrize("grid", some(GRIDS, 1, 2, 3), ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NORMS)
def test_norm(name: str, training: bool, grid: Grid) -> None:
    holds(trained(NORMS[name]()).train(training), image(2, 4, 12, 11), grid)


@pytest.mark.parametrize("name", ["batch", "instance", "group"])
def test_moments_are_merged_stably(name: str) -> None:
    """A mean a million times the deviation: E[x²] − E[x]² would lose all digits."""
    holds(trained(NORMS[name]()), image(2, 4, 12, 11, seed=9) + 1e6, Grid((2, 2)), tolerance=1e-8)


@pytest.mark.parametrize("dims", [1, 3])
def test_batch_norm_of_signals_and_volumes(dims: int) -> None:
    norm = trained((nn.BatchNorm1d if dims == 1 else nn.BatchNorm3d)(3))
    holds(norm, image(2, 3, *(7,) * dims), Grid((2,) + (1,) * (dims - 1)))


class ChannelsLast(nn.Module):
    """Norm and linear layer on the channels, as ConvNeXt writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def test_layer_norm_of_the_channels() -> None:
    holds(ChannelsLast().double(), image(2, 4, 12, 11), Grid((2, 2)))


def test_weight_norm() -> None:
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 3, 3, padding=1).double())
    holds(NormedConv(conv.parametrizations.weight.original0.data), image(2, 4, 12, 11), Grid((2, 2)))


class NormedConv(nn.Module):
    """A convolution under weight norm, made where it runs (parametrized modules do not pickle)."""

    def __init__(self, gain: Tensor):
        super().__init__()
        self.gain, self.direction = nn.Parameter(gain), nn.Parameter(image(3, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, torch._weight_norm(self.direction, self.gain, 0), padding=1)


@pytest.mark.parametrize(
    "code", ["F.batch_norm(x, None, None, training=True)", "F.instance_norm(x)", "F.layer_norm(x, (11,))"]
)
def test_functional_forms(code: str) -> None:
    holds(Expr(code), image(2, 4, 12, 11), Grid((2, 1)))
