"""The law on a GPU that several ranks share (gloo, messages through CUDA IPC or pinned memory)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness.vision import narrowed
from torch import nn
from torch.utils.checkpoint import checkpoint

from law import Expr, Grid, difference, holds, image
from mural.models import FCN2D, UNet
from ranks import run_on

ROWS, BLOCKS = Grid((2, 1), device="cuda"), Grid((2, 2), device="cuda")
MODULES = {
    "conv 3x3": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "conv 3x3 stride 2": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1),
    "conv 4x4 stride 2": lambda: nn.Conv2d(4, 4, 4, stride=2, padding=1),
    "conv dilated groups": lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2),
    "conv circular": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    "conv reflect": lambda: nn.Conv2d(4, 4, 5, padding=2, padding_mode="reflect"),
    "transposed k2s2": lambda: nn.ConvTranspose2d(4, 4, 2, 2),
    "transposed k3s2p1": lambda: nn.ConvTranspose2d(4, 4, 3, 2, 1, 1),
    "max-pool": lambda: nn.MaxPool2d(3, 2, 1),
    "average pool": lambda: nn.AvgPool2d(3, 1, 1),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d((3, 5)),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "layer norm": lambda: nn.LayerNorm((33, 29)),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic align_corners": lambda: nn.Upsample(size=(50, 41), mode="bicubic", align_corners=True),
    "nearest size": lambda: nn.Upsample(size=(50, 41)),
    "softmax": lambda: nn.Softmax(2),
    "UNet": lambda: UNet(in_channels=4, width=4, depth=3),
    "UNet instance residual": lambda: UNet(
        in_channels=4, width=4, depth=2, norm="instance", block="residual", upsample="interpolate"
    ),
    "resnet18": lambda: nn.Sequential(nn.Conv2d(4, 3, 1), narrowed("resnet18", 16, classes=5)),
    "FCN2D": lambda: FCN2D(in_channels=4, width=4, dropout=0.0),
    "reductions": lambda: Expr("x.var((2, 3)) + x.amax((2, 3)) + x.mean((2, 3)) + torch.logsumexp(x, (2, 3))"),
    "shapes": lambda: Expr("torch.cat([x.flip(2), x], 2)[:, :, 3:-4].permute(0, 2, 3, 1).reshape(2, -1, 4)"),
}  # fmt: skip


def cuda_only() -> bool:
    return torch.cuda.is_available()


if not cuda_only() and __name__ != "__main__":
    import pytest

    pytestmark = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")


def test_the_law_on_cuda() -> None:
    for grid in (ROWS, BLOCKS, Grid((1, 1), data=2, device="cuda")):
        for name, build in MODULES.items():
            torch.manual_seed(3)
            holds(build().double(), image(2, 4, 33, 29), grid, tolerance=1e-9)
            print("exact:", name, grid.spatial, grid.data, flush=True)
    volume = UNet(3, in_channels=4, width=4, depth=2).double()
    holds(volume, image(1, 4, 17, 16, 13), Grid((2, 1, 2), device="cuda"), tolerance=1e-9)


def dropped(grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = grid.mesh()
    torch.manual_seed(7)
    x = grid.shard(image(2, 8, 61, 43).cuda()).requires_grad_()
    y = checkpoint(lambda v: nn.functional.dropout2d(nn.functional.dropout(v, 0.4) * v, 0.2), x, use_reentrant=False)
    y.square().sum().backward()
    if mesh.rank < 0:
        raise RuntimeError
    return y.full().detach().cpu(), x.grad.full().cpu()


def test_dropout_on_cuda_is_the_same_on_every_grid() -> None:
    reference = run_on(1, dropped, Grid((1, 1), device="cuda"))[0]
    for grid in (ROWS, BLOCKS):
        for found in run_on(grid.world, dropped, grid):
            assert max(difference(a, b) for a, b in zip(found, reference, strict=True)) < 1e-12


def autocast_types() -> list[str]:
    grid, wrong = ROWS, []
    torch.manual_seed(0)
    x = image(2, 4, 12, 12).float().cuda()
    norms = [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((12, 12))]
    others = [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ConvTranspose2d(4, 4, 2, 2),
        nn.MaxPool2d(2),
        nn.Softmax(2),
        nn.AvgPool2d(3, 1, 1),
    ]
    for module in (*norms, *others):
        net = nn.Sequential(nn.Conv2d(4, 4, 1), module).cuda().to(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            expected, got = net(x), net(grid.shard(x))
            loss = got.square().mean()
        if got.dtype != expected.dtype or difference(got.full().float(), expected.float()) > 0.03:
            wrong.append(f"{module}: {got.dtype} for {expected.dtype}, {difference(got.full(), expected)}")
        loss.backward()
    return wrong


def test_autocast_on_cuda() -> None:
    assert run_on(2, autocast_types) == [[], []]


if __name__ == "__main__":
    test_the_law_on_cuda()
    test_dropout_on_cuda_is_the_same_on_every_grid()
    test_autocast_on_cuda()
    print("3 passed, 0 failed")
