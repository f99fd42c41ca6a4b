"""Pools with positions, patches, sampling, scans and order statistics under the law, each an expression on grids."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mural
from law import Expr, Grid, difference, holds, image, raises, since, some
from mural.geometry import Interval
from mural.shard.ops.reduce import order
from mural.shard.ops.windowed import deform
from mural.shard.ops.windowed.diff import diff_rule
from mural.shard.ops.windowed.unfold import fold_rule, unfold_rule
from mural.shard.rules import tile
from ranks import run_on

ROWS, THIRDS = Grid((2, 1)), Grid((3, 1))
UNEVEN, BLOCKS, BATCH = Grid((2, 1), cuts=((3, 10),)), Grid((2, 2)), Grid((1, 2), data=2)
EMPTY = Grid((3, 1), cuts=((0, 9, 4),))
TWO = [image(2, 4, 13, 11), image(2, 4, 13, 11, seed=1)]

POOLS = """
F.lp_pool2d(x, 2, 3)
F.lp_pool2d(x, 3, 2, 1)
F.lp_pool2d(x.relu(), 2.0, (2, 3), (1, 2), True)
F.lp_pool2d(x.abs() + 0.1, 1.5, 3, ceil_mode=True)
F.lp_pool2d(x, 1, 2)
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
MORE_POOLS = since("2.13", 'F.lp_pool2d(x, float("inf"), 3, 2)', 'F.lp_pool2d(x, -float("inf"), 3, 2)')

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
""".strip().splitlines()
MORE_ORDERS = since("2.13", "x.aminmax()", "x.round().aminmax(dim=2)", "torch.aminmax(x, dim=2, keepdim=True)")

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


@pytest.mark.parametrize("grid", some([UNEVEN, BLOCKS, BATCH, EMPTY], 2), ids=str)
@pytest.mark.parametrize("code", [*POOLS, *MORE_POOLS])
def test_pools(code: str, grid: Grid) -> None:
    holds(Expr(code), TWO, grid)


@pytest.mark.parametrize("grid", some([UNEVEN, BLOCKS, BATCH, EMPTY], 2), ids=str)
@pytest.mark.parametrize("code", PATCHES)
def test_patches(code: str, grid: Grid) -> None:
    holds(Expr(code), TWO, grid)


@pytest.mark.parametrize("grid", [BLOCKS, EMPTY], ids=str)
@pytest.mark.parametrize("code", SCANS)
def test_scans(code: str, grid: Grid) -> None:
    holds(Expr(code), TWO, grid)


@pytest.mark.parametrize("grid", [BLOCKS, EMPTY], ids=str)
@pytest.mark.parametrize("code", [*ORDERS, *MORE_ORDERS])
def test_orders(code: str, grid: Grid) -> None:
    holds(Expr(code), TWO, grid)


@pytest.mark.parametrize("grid", [BLOCKS, EMPTY], ids=str)
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


RANDOM = ["F.rrelu(x, training=True)", "F.gumbel_softmax(x, 0.7, dim=1)", "F.gumbel_softmax(x, hard=True, dim=2)"]


def drawn(code: str, grid: Grid) -> tuple[Tensor, Tensor]:
    """Output and input gradient of a random layer."""
    mural.init(spatial=grid.spatial, data=grid.data)
    torch.manual_seed(7)
    x = grid.shard(image(2, 4, 13, 11)).requires_grad_()
    y = Expr(code)(x)
    (y * image(2, 4, 13, 11, seed=2)).sum().backward()
    return y.full().detach(), x.grad.full()


@pytest.mark.parametrize("code", RANDOM)
def test_random_activations_draw_the_same_numbers_on_every_grid(code: str) -> None:
    reference = run_on(1, drawn, code, Grid((1, 1)))[0]
    assert float(reference[0].std()) > 0.05
    for grid in (ROWS, BLOCKS, EMPTY):
        for found in run_on(grid.world, drawn, code, grid):
            assert max(difference(a, b) for a, b in zip(found, reference, strict=True)) < 1e-12, grid


class Sample(nn.Module):
    """Sampling under an affine map, or at given points; the map's parameters learn too."""

    def __init__(self, map_: Any, mode: str, padding: str, align: bool, outs: tuple[int, ...], grid: Grid | None):
        super().__init__()
        self.points = nn.Parameter(torch.as_tensor(map_, dtype=torch.float64))
        self.mode, self.padding, self.align, self.outs, self.grid = mode, padding, align, outs, grid

    def forward(self, x: Tensor) -> Tensor:
        points: Tensor = self.points
        if self.grid is not None and isinstance(x, mural.ShardedTensor):
            # As a localisation network gives it: sharded, and whole along the image's dims.
            points = x.mean(tuple(range(1, x.ndim))).view(-1, *(1,) * (points.ndim - 1)) * 0 + points
        if points.ndim == 3:
            points = nn.functional.affine_grid(points, [*x.shape[:2], *self.outs], self.align)
        return nn.functional.grid_sample(x, points, self.mode, self.padding, self.align)


MAPS = {
    "nothing changes": [[1.0, 0, 0], [0, 1, 0]],
    "a small turn": [[1.02, 0.04, 0.01], [-0.05, 0.97, 0.03]],
    "transposed": [[0.0, 1.1, 0], [1.1, 0, 0]],
    "far outside": [[2.5, 0.3, 1.4], [0.2, -2.2, 0.3]],
}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["plain map", "sharded map"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("name", MAPS)
def test_sampling_under_maps(name: str, mode: str, padding: str, sharded: bool) -> None:
    for align, outs, grid in ((False, (13, 11), ROWS), (True, (7, 20), BLOCKS)):
        module = Sample([MAPS[name]] * 2, mode, padding, align, outs, grid if sharded else None)
        holds(module, image(2, 3, 13, 11), grid)


@pytest.mark.parametrize("grid", [UNEVEN, EMPTY, BATCH], ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_sampling_at_random_points(mode: str, grid: Grid) -> None:
    module = Sample(image(2, 9, 14, 2, seed=5), mode, "border", False, (), grid)
    holds(module, image(2, 3, 13, 11), grid)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_sampling_volumes(mode: str, padding: str) -> None:
    turn = [[[1.02, 0.04, 0.01, 0], [-0.05, 0.97, 0.03, 0.1], [0.1, 0, 1.3, -0.2]]]
    for grid in (Grid((2, 1, 1)), Grid((1, 2, 2))):
        holds(Sample(turn, mode, padding, False, (6, 5, 9), grid), image(1, 2, 6, 7, 5), grid)


def sampled_by_sharded_grid(where: str) -> float:
    """A sharded grid, of a sharded and of a plain image, with gradients of both."""
    grid = BLOCKS
    x, points = image(2, 3, 13, 11), image(2, 17, 9, 2, seed=1)
    leaves = [x.clone().requires_grad_(), points.clone().requires_grad_()]
    weights = image(2, 3, 17, 9, seed=2)
    expected = nn.functional.grid_sample(*leaves, align_corners=False)
    (expected * weights).sum().backward()
    a: Any = grid.shard(x) if where == "sharded" else x.clone()
    b = grid.shard(points, dims=(1, 2))
    a.requires_grad_()
    b.requires_grad_()
    y = nn.functional.grid_sample(a, b, align_corners=False)
    assert isinstance(y, mural.ShardedTensor)
    assert y.placement.cut_dims == (2, 3)
    (y * weights).sum().backward()
    if where == "plain":
        mural.reduce_gradients([a], grid.mesh())
    found = [y.full(), a.grad.full() if where == "sharded" else a.grad, b.grad.full()]
    return max(difference(f, e) for f, e in zip(found, [expected, leaves[0].grad, leaves[1].grad], strict=True))


@pytest.mark.parametrize("where", ["sharded", "plain"])
def test_sampling_by_a_sharded_grid(where: str) -> None:
    assert max(run_on(4, sampled_by_sharded_grid, where)) < 1e-10


def sampled_bytes() -> tuple[int, tuple[int, ...]]:
    """What travels for a grid that moves the image by two pixels."""
    mesh = ROWS.mesh()
    x = ROWS.shard(image(1, 4, 64, 32).float())
    points = nn.functional.affine_grid(torch.tensor([[[1.0, 0, 0], [0, 1, 2 / 32]]]), [1, 4, 64, 32], False)
    with mesh.transport.record() as record:
        y = nn.functional.grid_sample(x, points, align_corners=False)
    return record.bytes, y.placement.cut_dims


def test_sampling_fetches_the_window_that_it_reads() -> None:
    for sent, cut in run_on(2, sampled_bytes):
        assert cut == (2,)
        assert sent <= 4 * 4 * 32 * 4 + 64, "a few rows and the ranks' boxes"


def deformable(x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, *numbers: Any) -> Tensor:
    """Torchvision's operator in plain torch: columns sampled at moved positions, times the weights."""
    (sh, sw, ph, pw, dh, dw, groups, moves, use_mask), (kh, kw) = numbers, weight.shape[-2:]
    (n, c, h, w), (ho, wo) = x.shape, offset.shape[-2:]
    offset = offset.view(n, moves, kh, kw, 2, ho, wo)
    rows = torch.arange(ho).view(-1, 1) * sh - ph + (torch.arange(kh) * dh).view(-1, 1, 1, 1)
    columns = torch.arange(wo) * sw - pw + (torch.arange(kw) * dw).view(-1, 1, 1)
    y, z = offset[:, :, :, :, 0] + rows, offset[:, :, :, :, 1] + columns
    points = torch.stack([(2 * z + 1) / w - 1, (2 * y + 1) / h - 1], -1).flatten(0, 1).flatten(1, 4).unsqueeze(1)
    found = nn.functional.grid_sample(x.reshape(n * moves, c // moves, h, w), points, align_corners=False)
    found = found.view(n, moves, c // moves, kh, kw, ho, wo)
    if use_mask:
        found = found * mask.view(n, moves, 1, kh, kw, ho, wo)
    found = found.reshape(n, groups, -1, ho, wo)
    return torch.einsum("ngkhw,gok->ngohw", found, weight.reshape(groups, weight.shape[0] // groups, -1)).flatten(
        1, 2
    ) + bias.view(-1, 1, 1)


class Deformable(nn.Module):
    """A deformable convolution as `torchvision.ops.DeformConv2d` calls it."""

    def __init__(self, kernel: int, stride: int, padding: int, dilation: int, moves: int, masked: bool, far: float):
        super().__init__()
        self.weight, self.bias = nn.Parameter(image(4, 2, kernel, kernel)), nn.Parameter(image(4, seed=3))
        self.offset = nn.Conv2d(4, 2 * moves * kernel**2, kernel, stride, padding, dilation).double()
        self.mask = nn.Conv2d(4, moves * kernel**2, kernel, stride, padding, dilation).double() if masked else None
        self.numbers = (stride, stride, padding, padding, dilation, dilation, 2, moves, masked)
        self.far = far

    def forward(self, x: Tensor) -> Tensor:
        define_deformable()
        offset = self.offset(x) * self.far
        mask = torch.zeros((x.shape[0], 1), dtype=x.dtype) if self.mask is None else self.mask(x).sigmoid()
        return torch.ops.torchvision.deform_conv2d(x, self.weight, offset, mask, self.bias, *self.numbers)


def define_deformable() -> None:
    """Make the operator known where torchvision's library is not loaded, and the rule for it."""
    if not hasattr(torch.ops.torchvision, "deform_conv2d"):
        kinds = ["Tensor"] * 5 + ["int"] * 8 + ["bool"]
        schema = ", ".join(f"{kind} a{i}" for i, kind in enumerate(kinds))
        torch.library.define("torchvision::deform_conv2d", f"({schema}) -> Tensor")
        torch.library.impl("torchvision::deform_conv2d", "CompositeImplicitAutograd", deformable)
    deform.enter()


@pytest.mark.parametrize("grid", some([ROWS, BLOCKS, EMPTY, BATCH], 1), ids=str)
@pytest.mark.parametrize(
    "numbers",
    [(3, 1, 1, 1, 1, False, 1.0), (3, 2, 1, 2, 2, True, 3.0), (2, 3, 0, 1, 1, True, 20.0), (3, 1, 1, 1, 1, True, 0.0)],
    ids=str,
)
def test_deformable_convolution(numbers: tuple[Any, ...], grid: Grid) -> None:
    holds(Deformable(*numbers), image(2, 4, 13, 11), grid)


REFUSED = {
    "torch.fft.fft2(x)": ".full()",
    "torch.fft.rfftn(x, dim=(2, 3))": "every frequency depends on every position",
    "torch.fft.fftshift(x)": ".full()",
    "F.fractional_max_pool2d(x, 2, 3)": "adaptive_max_pool",
    "F.fractional_max_pool2d(x, 2, output_ratio=0.5, return_indices=True)": "adaptive_max_pool",
    "F.fractional_max_pool3d(x[:, None], 2, 3)": "adaptive_max_pool",
    "x.unique()": ".full()",
    "x.nonzero()": ".full()",
    "torch.where(x > 0)": "give both values",
    "torch.histogram(x, 5)": ".full()",
    "torch.bincount((x > 0).long()[0, 0, :, 0])": ".full()",
    "torch.masked_select(x, x > 0)": ".full()",
    "x[x > 0]": "torch.where",
    "torch.cdist(x, x)": ".full()",
    "F.glu(x, 2)": ".full()",
    "F.embedding((x > 0).long(), image(2, 3), max_norm=1.0)": ".full()",
    "torch.searchsorted(x.sort(1).values, x)": ".full()",
    "F.max_unpool2d(x, (x * 0).long() + 999, 2)": "outside",
    "F.unfold(x, 13)": "no output",
    "F.fold(x.reshape(1, 4, 144), (13, 13), 2, stride=5)": "columns",
    "F.grid_sample(x, image(2, 3, 3, 2))": "of the same batch",
    "x.topk(20, 2)": "out of range",
    "x.unfold(2, 13, 1)": "dim 2, which has 12",
}


def run_refused(code: str) -> None:
    Expr(code)(ROWS.shard(image(1, 4, 12, 12)))


@pytest.mark.parametrize("code", REFUSED)
def test_what_is_refused_says_why(code: str) -> None:
    raises(REFUSED[code], Exception, run_refused, code)


def too_much_to_gather() -> None:
    order.LIMIT = 100
    try:
        ROWS.shard(image(1, 4, 12, 12)).sort(2)
    finally:
        order.LIMIT = 2**22


def test_sorting_more_than_a_rank_should_hold_is_refused() -> None:
    raises("call .full() first if they fit", mural.UnsupportedOp, too_much_to_gather)


def whole_spectrum() -> float:
    """A tensor that every rank holds whole is transformed as torch does it."""
    x = ROWS.shard(image(1, 4, 12, 12)).mean(2)
    return difference(torch.fft.fft2(x).abs().full(), torch.fft.fft2(image(1, 4, 12, 12).mean(2)).abs())


def test_the_spectrum_of_a_replicated_tensor() -> None:
    assert max(run_on(2, whole_spectrum)) < 1e-12


def columns_stay_apart() -> tuple[int, ...]:
    """How many values each rank holds of an unfolded image, and of its fold."""
    columns = nn.functional.unfold(BLOCKS.shard(image(1, 2, 16, 16)), 3, padding=1)
    return columns.local.numel(), nn.functional.fold(columns, (16, 16), 3, padding=1).local.numel()


def test_columns_stay_where_their_windows_lie() -> None:
    assert run_on(4, columns_stay_apart) == [(2 * 9 * 64, 2 * 64)] * 4


class Recomputed(nn.Module):
    """Exchanges that depend on data, under a checkpoint that runs them again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) * x

    def body(self, x: Tensor) -> Tensor:
        f = nn.functional
        y = f.max_unpool2d(*f.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape)
        points = (x[:, :2] + y[:, :2].cumsum(2) * 0.1).permute(0, 2, 3, 1).tanh()
        return f.grid_sample(y + x.logcumsumexp(2), points, align_corners=False) + x.cummax(2).values


@pytest.mark.parametrize("grid", [UNEVEN, BLOCKS, EMPTY], ids=str)
def test_under_checkpoint(grid: Grid) -> None:
    holds(Recomputed(), image(2, 4, 13, 11), grid)


@pytest.mark.parametrize("name", ["logcumsumexp", "cumsum", "cummax"])
def test_scans_over_stretches_without_a_number(name: str) -> None:
    """A scan by totals gave NaN gradients where a rank's first values, or all, were minus infinity."""
    x = image(2, 4, 13, 11)
    x[:, :, 4:9] = float("-inf")
    x[x < -0.7] = float("-inf")
    holds(Expr(f"x.{name}(2)"), x, THIRDS)


AUTOCAST = """
F.grid_sample(F.conv2d(x, image(4, 4, 1, 1).float()), image(2, 9, 8, 2).float(), align_corners=False)
F.cosine_similarity(F.conv2d(x, image(4, 4, 1, 1).float()), x, dim=2)
F.conv2d(x, image(4, 4, 1, 1).float()).cumprod(2)
F.conv2d(x, image(4, 4, 1, 1).float()).prod(2)
F.max_pool2d(F.conv2d(x, image(4, 4, 1, 1).float()), 2, return_indices=True)[0]
F.lp_pool2d(F.conv2d(x, image(4, 4, 1, 1).float()), 2, 2)
""".strip().splitlines()


def autocast_types(code: str) -> tuple[bool, float]:
    """Whether the result has torch's type under autocast, and the difference."""
    x = image(2, 4, 13, 11).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = Expr(code)(x), Expr(code)(ROWS.shard(x))
    return found.dtype == expected.dtype, difference(found.full(), expected)


@pytest.mark.parametrize("code", AUTOCAST)
def test_types_under_autocast(code: str) -> None:
    for same, gap in run_on(2, autocast_types, code):
        assert same
        assert gap < 0.01


@pytest.mark.parametrize("cuts", [(2,), (3, 4), (1, 5)], ids=str)
def test_patches_and_differences_in_tiles(cuts: tuple[int, ...]) -> None:
    """Disjoint tiles of the new rules give torch's result."""
    x, f = image(2, 4, 13, 11), nn.functional
    columns = f.unfold(x, (3, 2), 2, 1, (2, 1))
    blocks = columns.unflatten(-1, (6, 11))
    cases = [
        (unfold_rule((13, 11), (3, 2), 2, 1, (2, 1)), x, blocks),
        (fold_rule((6, 11), (13, 11), (3, 2), 2, 1, (2, 1)), blocks, f.fold(columns, (13, 11), (3, 2), 2, 1, (2, 1))),
        (diff_rule((13, 11), 2), x, x.diff(2, 2)),
    ]
    for rule, given, expected in cases:
        rows = [0, *cuts, expected.shape[-2]]
        parts = [tile(given, rule, (Interval(a, b), Interval(0, expected.shape[-1]))) for a, b in pairwise(rows)]
        assert difference(torch.cat(parts, -2), expected) < 1e-12, rule.name
