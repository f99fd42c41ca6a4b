"""Pools with positions, patches, sampling, scans and order statistics under the law, each an expression on grids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mural
from law import Expr, Grid, holds, image, raises

ROWS, COLUMNS, THIRDS = Grid((2, 1)), Grid((1, 2)), Grid((3, 1))
UNEVEN, BLOCKS, BATCH = Grid((2, 1), cuts=((3, 10),)), Grid((2, 2)), Grid((1, 2), data=2)
EMPTY = Grid((3, 1), cuts=((0, 9, 4),))
TWO = [image(2, 4, 13, 11), image(2, 4, 13, 11, seed=1)]

POOLS = """
F.lp_pool2d(x, 2, 3)
F.lp_pool2d(x, 3, 2, 1)
F.lp_pool2d(x.relu(), 2.0, (2, 3), (1, 2), True)
F.lp_pool2d(x.abs() + 0.1, 1.5, 3, ceil_mode=True)
F.lp_pool2d(x, 1, 2)
F.lp_pool2d(x, float("inf"), 3, 2)
F.lp_pool2d(x, -float("inf"), 3, 2)
F.lp_pool1d(x[:, :, :, 3], 2, 3, 2)
F.lp_pool1d(x[:, :, 5], 4, 2)
F.max_pool2d(x, 2, return_indices=True)
F.max_pool2d(x, 3, 2, 1, return_indices=True)
F.max_pool2d(x, (3, 2), (1, 2), (1, 0), (2, 3), ceil_mode=True, return_indices=True)
F.max_pool2d(x.round(), 3, 1, 1, return_indices=True)
F.max_pool2d(x * 0 - float("inf"), 3, 2, 1, return_indices=True)[1] + x.sum()
F.max_pool2d_with_indices(x, 3)
F.max_pool2d(x[0], 3, 2, return_indices=True)
F.max_pool1d(x[:, :, :, 2], 3, 2, 1, return_indices=True)
F.adaptive_max_pool2d(x, (5, 4), return_indices=True)
F.adaptive_max_pool2d(x.round(), (7, 3), return_indices=True)
F.adaptive_max_pool2d(x, 1, return_indices=True)
F.adaptive_max_pool2d(x.round(), (2, None), return_indices=True)
F.adaptive_max_pool2d(torch.where(x > 1, float("nan"), x), (2, 3), return_indices=True)[1] + x.sum()
F.adaptive_max_pool1d(x[:, :, :, 2], 3, return_indices=True)
torch.adaptive_max_pool1d(x[:, :, :, 2], 5)
F.max_unpool2d(*F.max_pool2d(x[:, :, :12, :10], 2, return_indices=True), 2)
F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape)
F.max_unpool2d(*F.max_pool2d(x, 3, 2, 1, return_indices=True), 3, 2, 1)
F.max_unpool2d(y[:, :, :7, :6], F.max_pool2d(x, 3, 2, 1, return_indices=True)[1], 3, 2, 1, (13, 11))
F.max_unpool2d(*F.max_pool2d(x[0, :, 1:, 1:], 2, return_indices=True), 2)
F.max_unpool2d(x[:, :, :6, :5], image(2, 4, 6, 5, seed=4).abs().mul(20).long(), 2, output_size=(13, 11))
F.max_unpool1d(*F.max_pool1d(x[:, :, :, 2], 2, return_indices=True), 2, output_size=(13,))
""".strip().splitlines()

PATCHES = """
F.unfold(x, 3)
F.unfold(x, (2, 3), padding=(1, 2), stride=(2, 1))
F.unfold(x, 3, dilation=2, padding=1, stride=2)
F.unfold(x[0], 3, padding=1)
F.unfold(x, (1, 3), padding=(0, 1)).view(2, 4, 3, 13, 11).sum(2)
F.fold(F.unfold(x, 3), (13, 11), 3)
F.fold(F.unfold(x, 3, 2, 1, 2), (13, 11), 3, 2, 1, 2)
F.fold(F.unfold(x, 2, stride=3), (13, 11), 2, stride=3)
F.fold(F.unfold(x[0], (3, 2), 1, 1, (4, 1)) ** 2, (13, 11), (3, 2), 1, 1, (4, 1))
F.fold(x.reshape(2, 4, 143)[:, :, :120], (13, 11), 2)
x.unfold(2, 3, 2)
x.unfold(-1, 4, 1)
x.unfold(2, 1, 1) * 2
x.unfold(2, 13, 1)
x.unfold(1, 2, 2)
x.unfold(0, 2, 1)
x.unfold(2, 3, 2).unfold(3, 2, 3).sum((-1, -2))
x.unfold(2, 2, 5)
""".strip().splitlines()

SCANS = """
x.cumsum(2)
torch.cumsum(x, -1)
x.cumsum(0)
x.flip(2).cumsum(2)
(x > 0).cumsum(2) + x.sum()
x.cumsum(2, dtype=torch.float64)
x.cumprod(2)
(x * (x > -0.5)).cumprod(2)
x.logcumsumexp(2)
(x * 300).logcumsumexp(3)
torch.where(x > 0, x, -float("inf")).logcumsumexp(2)
x.cummax(2)
x.round().cummax(2)
x.round().cummin(2)
x.flip(2).cummin(2)
torch.where(x > 1.5, float("nan"), x).cummax(2)[1] + x.sum()
(x * 3).long().cummax(2)[0] + x.sum()
torch.where(x > 0, x, -float("inf")).cummax(2)
x.prod(2)
x.prod()
x.prod(3, keepdim=True)
(x * (x > -1.5)).prod(2)
(x * (x.abs() > 0.1)).prod(2)
x.diff(dim=2)
x.diff()
x.diff(3, 2)
torch.diff(x, dim=2, prepend=y[:, :, :2], append=image(2, 4, 1, 11))
(x > 0).diff(dim=2).sum() + x.sum()
x.diff(12, 2)
x.diff(13, 2).sum() + x.sum()
""".strip().splitlines()

ORDERS = """
x.topk(3, 2)
x.topk(4, 3, largest=False)
x.topk(13, 2)
torch.topk(x, 2, 0, True, True)
x.sort(2)
x.sort(dim=2, descending=True, stable=True)
x.round().sort(dim=2, stable=True)
x.argsort(2) + x.sum()
x.msort()
x.kthvalue(3, 2)
x.kthvalue(3, 2, keepdim=True)
x.median(2)
x.median()
x.nanmedian(2)
(x * 4).round().mode(2)[0]
x.quantile(0.3, 2)
x.quantile(torch.tensor([0.1, 0.7], dtype=torch.float64), 2, keepdim=True)
x.quantile(0.5)
x.aminmax()
x.round().aminmax(dim=2)
torch.aminmax(x, dim=2, keepdim=True)
""".strip().splitlines()

OTHERS = """
F.local_response_norm(x, 3)
F.local_response_norm(x, 4, alpha=0.3, beta=0.5, k=2.0)
F.local_response_norm(x[:, :, 4], 3)
F.normalize(x, dim=2)
F.normalize(x, 3.0, dim=3)
F.normalize(x, dim=(2, 3))
F.normalize(x * 0, dim=2)
F.normalize(x, dim=1)
F.cosine_similarity(x, y, dim=2)
F.cosine_similarity(x, y)
F.cosine_similarity(x, x * 0, dim=3)
F.cosine_similarity(x, y[:, :1], dim=2)
F.rrelu(x)
F.rrelu(x, 0.2, 0.4)
F.threshold(x, 0.1, 20.0)
torch.meshgrid(x[0, 0, :, 0], y[0, 0, 0], indexing="ij")
torch.meshgrid(x[0, 0, :, 0], x[0, 0, :, 1], image(3), indexing="xy")
torch.meshgrid([x[0, 0, :, 0], y[0, 0, 0]], indexing="ij")
F.embedding((x > 0).long(), image(2, 3)) + x.unsqueeze(-1)
F.embedding((x > 0).long(), image(2, 3), padding_idx=1) * x.unsqueeze(-1)
torch.tril(x)
torch.triu(x, 2)
x.tril(-3) + x.transpose(2, 3).triu(1).transpose(2, 3)
(x * 1).tril_(1)
torch.addmm(image(13, 3), x[0, 0], image(11, 3), beta=0.5, alpha=2)
torch.addmm(image(3), x[0, 0], image(11, 3))
torch.clamp(x, y, y + 1)
torch.lerp(x, y, y)
torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), right=True) + x.sum()
torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), x) + x.sum()
torch.std(x, (2, 3))
torch.rot90(x, 1, (2, 3))
torch.rot90(x, -2, (2, 3))
x.rot90(3, (2, 3))
torch.broadcast_tensors(x, y[:, :1], image(11))
""".strip().splitlines()


@pytest.mark.parametrize("grid", [ROWS, UNEVEN, BLOCKS, BATCH, EMPTY], ids=str)
@pytest.mark.parametrize("code", POOLS)
def test_pools(code: str, grid: Grid) -> None:
    holds(Expr(code), TWO, grid)


@pytest.mark.parametrize("grid", [ROWS, UNEVEN, BLOCKS, BATCH, EMPTY], ids=str)
@pytest.mark.parametrize("code", PATCHES)
def test_patches(code: str, grid: Grid) -> None:
    holds(Expr(code), TWO, grid)


@pytest.mark.parametrize("grid", [THIRDS, BLOCKS, EMPTY], ids=str)
@pytest.mark.parametrize("code", SCANS)
def test_scans(code: str, grid: Grid) -> None:
    holds(Expr(code), TWO, grid)


@pytest.mark.parametrize("grid", [ROWS, BLOCKS, EMPTY], ids=str)
@pytest.mark.parametrize("code", ORDERS)
def test_orders(code: str, grid: Grid) -> None:
    holds(Expr(code), TWO, grid)


@pytest.mark.parametrize("grid", [ROWS, BLOCKS, EMPTY], ids=str)
@pytest.mark.parametrize("code", OTHERS)
def test_others(code: str, grid: Grid) -> None:
    holds(Expr(code), TWO, grid)


VOLUMES = """
F.lp_pool3d(x, 2, 2)
F.max_pool3d(x, 2, 1, 1, return_indices=True)
F.adaptive_max_pool3d(x, (2, 3, 4), return_indices=True)
F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2, output_size=x.shape)
F.local_response_norm(x, 3)
x.unfold(2, 2, 1).unfold(3, 2, 2)
x.cumsum(3)
""".strip().splitlines()


@pytest.mark.parametrize("grid", [Grid((2, 1, 1)), Grid((1, 2, 2))], ids=str)
@pytest.mark.parametrize("code", VOLUMES)
def test_volumes(code: str, grid: Grid) -> None:
    holds(Expr(code), image(1, 2, 6, 7, 5), grid)
