"""Every cell of the table of peers' failures is a case here, by name, on two ranks (and on a 2-D grid)."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from law import Grid, holds, image

ROWS, BLOCKS = Grid((2, 1)), Grid((2, 2))


class TwoConvolutions(nn.Module):
    """Two convolutions that read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def mean_squared_error(x: Tensor) -> Tensor:
    return F.mse_loss(x, image(*x.shape, seed=3))


CELLS: dict[str, nn.Module] = {
    "conv 3x3 pad 1": nn.Conv2d(3, 4, 3, padding=1),
    "conv 3x3 stride 2": nn.Conv2d(3, 4, 3, stride=2, padding=1),
    "conv 4x4 stride 2 pad 1": nn.Conv2d(3, 4, 4, stride=2, padding=1),
    "dilation 2": nn.Conv2d(3, 4, 3, padding=2, dilation=2),
    "reflect padding": nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    "circular padding": nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "replicate padding": nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"),
    "max-pool 3 stride 2 pad 1": nn.MaxPool2d(3, 2, 1),
    "average pool 3 stride 1 pad 1": nn.AvgPool2d(3, 1, 1),
    "BatchNorm training": nn.BatchNorm2d(3),
    "GroupNorm": nn.GroupNorm(3, 3),
    "transposed conv k2s2": nn.ConvTranspose2d(3, 4, 2, 2),
    "transposed conv k4s2p1": nn.ConvTranspose2d(3, 4, 4, 2, 1),
    "transposed conv k3s2p1": nn.ConvTranspose2d(3, 4, 3, 2, 1),
    "bilinear x2": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear align_corners": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "bilinear size=": nn.Upsample(size=(77, 90), mode="bilinear"),
    "two convolutions on one input": TwoConvolutions(),
}


@pytest.mark.parametrize("grid", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("cell", CELLS)
def test_cell(cell: str, grid: Grid) -> None:
    holds(CELLS[cell].double(), image(1, 3, 64, 48), grid)


@pytest.mark.parametrize("cell", CELLS)
def test_cell_at_101x67_with_batch_2(cell: str) -> None:
    holds(CELLS[cell].double(), image(2, 3, 101, 67), ROWS)


@pytest.mark.parametrize("kernel", [5, 7, 9])
def test_shard_thinner_than_the_halo(kernel: int) -> None:
    holds(nn.Conv2d(3, 4, kernel, padding=kernel // 2).double(), image(1, 3, 8, 9), Grid((4, 1)))
    holds(nn.Conv2d(3, 4, kernel, padding=kernel // 2).double(), image(1, 3, 11, 9), Grid((3, 1), cuts=((1, 1, 9),)))


@pytest.mark.parametrize("grid", [ROWS, BLOCKS, Grid((3, 1)), Grid((1,), data=2)], ids=str)
def test_mean_squared_error(grid: Grid) -> None:
    holds(mean_squared_error, image(2, 3, 33, 29), grid)


def test_each_rank_reads_only_its_tile() -> None:
    from ranks import run_on

    assert run_on(2, reads_its_tile) == [True, True]


def reads_its_tile() -> bool:
    import mural

    mesh = Grid((2, 1)).mesh()
    start, stop = (0, 40) if mesh.rank == 0 else (40, 101)
    x = mural.shard(image(1, 3, 101, 7)[:, :, start:stop], mesh, box=((0, 1), (0, 3), (start, stop), (0, 7)))
    conv = nn.Conv2d(3, 2, 5, padding=2).double()
    for p in conv.parameters():
        nn.init.constant_(p, 0.1)
    return bool((conv(x).full() - conv(image(1, 3, 101, 7))).abs().max() < 1e-12)
