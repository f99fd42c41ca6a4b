"""Pointwise operations, shapes, reductions and losses under the law, each an expression on several grids."""

from __future__ import annotations

import pytest
import torch

from law import Expr, Grid, holds, image, names_for, some

GRIDS = [
    Grid((2, 1)),
    Grid((2, 2)),
    Grid((3, 1)),
    Grid((1, 2), data=2),
    Grid((1,), data=3),
    Grid((2, 1), cuts=((3, 10),)),
]

POINTWISE = """
x + 1
1 - x
x * y
x / (y.abs() + 1)
x.relu().sigmoid().tanh()
torch.exp(-x.square()).log1p()
x.clamp(-0.5, 0.5)
torch.clamp(x, min=y)
torch.where(x > 0, x, y)
torch.maximum(x, y)
torch.max(x, y)
x.masked_fill(y > 0, 2.0)
torch.lerp(x, y, 0.3)
torch.addcmul(x, x, y, value=0.5)
F.gelu(x) + F.silu(y) + F.leaky_relu(x, 0.2) + F.elu(x) + F.hardswish(x) + F.softplus(y)
F.relu(x * 1, inplace=True)
(x * 2).add_(y).mul_(3)
(x * 1).clamp_(0).add_(1).sqrt_()
x * image(4, 1, 1)
x * image(13, 1) + image(2, 4, 13, 11)
x + x.mean((2, 3), keepdim=True)
x * torch.sigmoid(F.adaptive_avg_pool2d(y, 1))
x * y[:, :1]
x[:, :, 3:] + y[:, :, :-3]
x.transpose(2, 3) * 2 + y.transpose(2, 3)
x.double().to(torch.float64).type_as(y)
torch.pow(x.abs() + 1, y) ** 2
torch.atan2(x, y) + torch.hypot(x, y)
x.lt(y).to(x.dtype) * x
torch.nan_to_num(x / x)
torch.special.ndtr(x) + torch.special.log_ndtr(y) + torch.special.i1(x) + torch.special.i0e(x) + torch.special.erfcx(x)
torch.special.entr(x.sigmoid()) + torch.special.xlog1py(x, y.abs()) + torch.special.gammaln(y.abs() + 1)
torch.special.psi(x.abs() + 1) + torch.special.ndtri(x.sigmoid()) + torch.special.multigammaln(x.abs() + 3, 2)
torch.view_as_real(torch.complex(x, y)) + torch.view_as_real(torch.polar(x.abs(), y).resolve_conj())
torch.zeros_like(x) + x.new_zeros(x.shape) + x.new_ones(2, 1, 1, 1) + x.new_full((2, 4, 1, 1), 3.0) + x
F.prelu(x, image(4))
F.glu(x, 1)
F.normalize(x, dim=1)
F.softsign(x) + F.threshold(y, 0.1, 20.0) + F.logsigmoid(x) + F.mish(x) + F.hardtanh(y) + F.relu6(x) + F.selu(x)
""".strip().splitlines()

SHAPES = """
x[:, 1:3]
x[:, :, 2:9]
x[:, :, ::2, 1::3]
x[:, :, 5:6].expand(2, 4, 13, 11) + x
x[..., 4]
x[:, :, -1]
x[1]
x[:, None]
x[:, [2, 0, 1]]
x.flip(2)
x.flip((2, 3)) + x
F.conv2d(x.flip(2), image(2, 4, 3, 3), padding=1).flip(2) + F.conv2d(x, image(2, 4, 3, 3), padding=1)
torch.cat([x, y], 1)
torch.cat([x, y, x], 2)
torch.cat([x, y], 3)
torch.cat([x, y], 0)
torch.cat([x[:, :, :5], y[:, :, 2:4], image(2, 4, 3, 11)], 2)
torch.stack([x, y], 1)
torch.stack([x, y])
x.split(5, 2)
x.split([3, 10], 2)
x.chunk(3, 3)
x.unbind(1)
torch.tensor_split(x, 3, 2)
x.narrow(2, 4, 5)
x.select(2, 7)
x.permute(0, 2, 3, 1)
x.permute(2, 0, 3, 1) * 2
x.movedim(1, -1)
x.flatten(2)
x.flatten(1)
x.reshape(2, 2, 2, 13, 11)
x.view(2, 4, -1)
x.reshape(-1, 13, 11)
x.reshape(8, 143)
x.reshape(2, 2, 2, 13, 11).flatten(1, 2)
x.unflatten(1, (2, 2)).sum(2)
x.flatten(2).unflatten(2, (13, 11)) + x
x.unsqueeze(1).squeeze(1)
x.mean(2, keepdim=True).squeeze(2)
x.repeat(1, 2, 1, 1)
x.repeat(1, 1, 2, 1)
x.roll(3, 2)
x.roll((1, -2), (2, 3))
x.roll(1, 1)
F.linear(x.permute(0, 2, 3, 1), image(5, 4), image(5))
F.linear(x, image(5, 11))
x.permute(0, 2, 3, 1) @ image(4, 3)
F.linear(x.flatten(1), image(7, 572))
F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), image(7, 4), image(7))
F.pixel_shuffle(x, 2)
F.pixel_unshuffle(x[:, :, :12, :10], 2)
F.pad(x, (1, 2, 3, 0))
F.pad(x, (-1, 2, -3, 4), value=1.5)
F.pad(x, (1, 2, 3, 1), mode="reflect")
F.pad(x, (1, 2, 3, 1), mode="replicate")
F.pad(x, (1, 2, 3, 1), mode="circular")
F.pad(x, (0, 0, 0, 0, 1, 2))
x[:, :, :7].relu() + y[:, :, 6:]
x.contiguous(memory_format=torch.channels_last).clone()
x.expand(3, 2, 4, 13, 11)
F.interpolate(x, scale_factor=2)
F.interpolate(x, size=(17, 5), mode="nearest-exact")
F.interpolate(x, size=(7, 23), mode="bilinear")
F.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear", recompute_scale_factor=True)
F.interpolate(x, scale_factor=1.5, mode="bicubic")
F.interpolate(x, size=(5, 6), mode="area")
F.adaptive_avg_pool2d(x, (3, 5))
F.adaptive_max_pool2d(x, (2, 4))
F.adaptive_max_pool2d(x, 1)
F.max_pool2d(x, 3, 2, ceil_mode=True)
F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
F.avg_pool2d(x, (2, 3), divisor_override=5)
F.conv2d(x, image(6, 2, 3, 3), image(6), stride=3, groups=2)
F.conv2d(x, image(4, 4, 2, 2), stride=3, padding=1)
F.conv_transpose2d(x, image(4, 3, 3, 3), image(3), stride=2, padding=1, output_padding=1)
F.conv_transpose2d(x, image(4, 2, 2, 2), stride=3, groups=2, dilation=2)
""".strip().splitlines()

REDUCTIONS = """
x.sum()
x.sum(2)
x.sum((0, 2, 3))
x.mean((2, 3))
x.mean(dim=1, keepdim=True)
x.var((2, 3))
x.var(0, unbiased=False)
x.std(dim=(0, 2))
torch.var_mean(x, (2, 3), correction=0)
x.amax((2, 3))
x.amin(2, keepdim=True)
x.max()
x.min(dim=2)
x.max(1)
x.argmax(1).to(x.dtype) * x[:, 0]
x.argmax(2).to(x.dtype) + x.sum(2)
(x.round() / 3).amax(2)
(x.round() / 3).max(2)
x.relu().amax((2, 3))
F.softmax(x, 1)
x.softmax(2)
x.log_softmax(3)
torch.logsumexp(x, (2, 3))
torch.logsumexp(x, 1)
F.softmin(x, 2)
x.cumsum(1)
x.topk(2, 1).values
x.sort(1).values
torch.norm(x, dim=1)
torch.linalg.vector_norm(x, 2, (0, 2, 3))
x.norm()
x.norm(p=1, dim=2, keepdim=True)
torch.linalg.vector_norm(x.relu(), 3, 2)
torch.norm(x, float("inf"), (2, 3))
x.prod(1)
F.one_hot((x > 0).long()[:, 0], 2).sum() + x.sum()
(x > 0).any().to(x.dtype) + (x > -9).all(2).sum() + x.sum()
torch.count_nonzero(x.relu()) * x.mean()
""".strip().splitlines()


@pytest.mark.parametrize("grid", some(GRIDS[:4], 0), ids=str)
@pytest.mark.parametrize("code", POINTWISE)
def test_pointwise(code: str, grid: Grid) -> None:
    holds(Expr(code), [image(2, 4, 13, 11), image(2, 4, 13, 11, seed=1)], grid)


@pytest.mark.parametrize("grid", some(GRIDS, 1, 5), ids=str)
@pytest.mark.parametrize("code", SHAPES)
def test_shapes(code: str, grid: Grid) -> None:
    holds(Expr(code), [image(2, 4, 13, 11), image(2, 4, 13, 11, seed=1)], grid)


@pytest.mark.parametrize("grid", some(GRIDS, 1, 5), ids=str)
@pytest.mark.parametrize("code", REDUCTIONS)
def test_reductions(code: str, grid: Grid) -> None:
    holds(Expr(code), image(2, 4, 13, 11), grid)


LOSSES = """
F.cross_entropy(x, t)
F.cross_entropy(x, t, weight=image(4).abs())
F.cross_entropy(x, t, ignore_index=1)
F.cross_entropy(x, t, label_smoothing=0.2)
F.cross_entropy(x, t, image(4).abs(), ignore_index=2, label_smoothing=0.1)
F.cross_entropy(x, t, reduction="sum")
F.cross_entropy(x, t, reduction="none")
F.cross_entropy(x, y.softmax(1))
F.cross_entropy(x, y.softmax(1), weight=image(4).abs(), label_smoothing=0.1, reduction="mean")
F.nll_loss(x.log_softmax(1), t, weight=image(4).abs(), ignore_index=0)
F.nll_loss(x.log_softmax(1), t, reduction="none")
F.binary_cross_entropy(x.sigmoid(), y.sigmoid())
F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=image(4, 1, 1).abs(), reduction="sum")
F.binary_cross_entropy_with_logits(x, y.sigmoid())
F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=image(4, 1, 1).abs())
F.binary_cross_entropy_with_logits(x, y.sigmoid(), weight=y.detach().abs(), reduction="none")
F.mse_loss(x, y)
F.mse_loss(x, y, reduction="none")
F.l1_loss(x, y)
F.l1_loss(x, image(2, 4, 13, 11, seed=7), reduction="sum")
F.smooth_l1_loss(x, y, beta=0.5)
F.huber_loss(x, y, delta=0.7)
F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean")
mural.dice_loss(x, t)
mural.dice_loss(x, t, ignore_index=2, background=False, smooth=0.1)
F.cross_entropy(x, t) + mural.dice_loss(x, t) * 0.5
F.cross_entropy(F.adaptive_avg_pool2d(x, 1).flatten(1), t[:, 0, 0])
F.cross_entropy(F.linear(x.flatten(1), image(5, 572)), t[:, 0, 0])
""".strip().splitlines()


class Loss(Expr):
    """An expression with a target of classes, plain or sharded."""

    def __init__(self, code: str, grid: Grid | None):
        super().__init__(code)
        self.grid = grid

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        import mural

        t = torch.randint(4, (2, 13, 11), generator=torch.Generator().manual_seed(5)).to(x.device)
        if isinstance(x, mural.ShardedTensor) and self.grid is not None:
            dims = tuple(range(1, 1 + len(self.grid.spatial)))
            t = self.grid.shard(t, dims=dims)
        return eval(self.code, {"x": x, "y": y, "t": t, **names_for(x)})


@pytest.mark.parametrize("target", ["plain target", "sharded target"])
@pytest.mark.parametrize("grid", some(GRIDS[:5], 3), ids=str)
@pytest.mark.parametrize("code", LOSSES)
def test_losses(code: str, grid: Grid, target: str) -> None:
    module = Loss(code, grid if target == "sharded target" else None)
    holds(module, [image(2, 4, 13, 11), image(2, 4, 13, 11, seed=1)], grid)
