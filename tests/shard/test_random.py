"""Random layers draw the same numbers whatever the grid, also under checkpoint's recompute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mural
from law import Grid, difference, image
from ranks import run_on

GRIDS = [
    Grid((1, 1)),
    Grid((2, 1)),
    Grid((2, 2)),
    Grid((3, 1)),
    Grid((1, 1), data=2),
    Grid((3, 1), cuts=((0, 40, 21),)),
]


def timm_drop_path(x: Tensor) -> Tensor:
    """As timm writes it."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(0.7)
    random_tensor.div_(0.7)
    return x * random_tensor


def torchvision_drop_path(x: Tensor) -> Tensor:
    """As torchvision writes it."""
    noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
    noise = noise.bernoulli_(0.7)
    noise.div_(0.7)
    return x * noise


class Twice(nn.Module):
    """Dropout inside and outside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda v: self.drop(v) * v, self.drop(x), use_reentrant=False)


LAYERS = {
    "dropout": lambda: nn.Dropout(0.4),
    "dropout in place": lambda: nn.Sequential(nn.Hardtanh(-9, 9), nn.Dropout(0.4, inplace=True)),
    "dropout2d": lambda: nn.Dropout2d(0.4),
    "alpha dropout": lambda: nn.AlphaDropout(0.4),
    "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.4),
    "drop-path as timm writes it": lambda: timm_drop_path,
    "drop-path as torchvision writes it": lambda: torchvision_drop_path,
    "under checkpoint": Twice,
    "rand_like": lambda: lambda x: x * torch.rand_like(x) + torch.randn_like(x),
    "bernoulli": lambda: lambda x: x * torch.bernoulli(x.sigmoid()) + x.clone().detach().bernoulli_(0.2),
    "uniform and normal": lambda: lambda x: x + torch.empty_like(x).uniform_(2, 3) * torch.zeros_like(x).normal_(1, 2),
}


def outputs(name: str, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient, and the generator's next number."""
    mural.init(spatial=grid.spatial, data=grid.data)
    layer = LAYERS[name]()
    torch.manual_seed(7)
    x = grid.shard(image(4, 8, 61, 43)).requires_grad_()
    y = layer(x)
    (y * image(4, 8, 61, 43, seed=2)).sum().backward()
    return y.full().detach(), x.grad.full(), torch.rand(2)


@pytest.mark.parametrize("name", LAYERS)
def test_same_numbers_on_every_grid(name: str) -> None:
    reference = run_on(1, outputs, name, GRIDS[0])[0]
    assert float(reference[0].std()) > 0.1
    for grid in GRIDS[1:]:
        for found in run_on(grid.world, outputs, name, grid):
            assert max(difference(a, b) for a, b in zip(found, reference, strict=True)) < 1e-12, grid


def statistics() -> list[float]:
    """Means of a large dropout: the mask is a fair draw, in every block."""
    grid = Grid((2, 2))
    torch.manual_seed(0)
    y = nn.functional.dropout(grid.shard(torch.ones(1, 16, 256, 256)), 0.25)
    full = y.full()
    return [
        float(full.mean()),
        float((full == 0).double().mean()),
        float(full[0, :, :128].mean() - full[0, :, 128:].mean()),
    ]


def test_dropout_is_a_fair_draw() -> None:
    for mean, dropped, skew in run_on(4, statistics):
        assert abs(mean - 1) < 0.005
        assert abs(dropped - 0.25) < 0.005
        assert abs(skew) < 0.01


def states() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())
    mural.init(spatial=(2, 1))
    return torch.rand(3).tolist()


def test_init_brings_the_generators_into_one_state() -> None:
    first, second = run_on(2, states)
    assert first == second


def channels_dropped() -> list[bool]:
    """Dropout of one image without a batch dim dropped positions instead of channels."""
    found = []
    for name, shape, dims in (
        ("dropout1d", (8, 20), (1,)),
        ("dropout3d", (8, 6, 6, 6), (1,)),
        ("dropout2d", (4, 8, 9), (2,)),
    ):
        y = getattr(nn.functional, name)(Grid((2,), dims=dims).shard(torch.ones(shape)), 0.5).full()
        per_channel = y.flatten(2 if name == "dropout2d" else 1)
        found.append(bool((per_channel == per_channel[..., :1]).all()) and 0 < float((y == 0).double().mean()) < 1)
    return found


def test_channel_dropout_without_a_batch() -> None:
    assert run_on(2, channels_dropped) == [[True] * 3] * 2
