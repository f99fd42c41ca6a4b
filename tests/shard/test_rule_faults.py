"""A test for each rule that gave another result than torch, or failed in torch's words, saying what it was."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from law import Expr, Grid, holds, image, raises
from mural.errors import MuralError
from ranks import run_on

GRIDS = [Grid((2, 1)), Grid((1, 2), data=2)]
W = "image(2, 4, 13, 11, seed=3).abs()"
RESULTS = {
    "two dims and an order are a matrix norm": (
        "[torch.linalg.norm(x, o, (2, 3)) for o in (1, -1, float('inf'), 'fro')], torch.linalg.norm(x, 1, (3, 1), True)"
    ),
    "linalg.norm of vectors": "torch.linalg.norm(x, 1, 3), torch.linalg.norm(x, None, (2, 3)), torch.linalg.norm(x)",
    "of a tensor of two dims": "torch.linalg.norm(x[0, 0], 1), torch.linalg.norm(x[0, 0], ord=-float('inf'))",
    "of merged dims": "torch.linalg.norm(x.flatten(2), 1, (1, 2)), torch.linalg.norm(x.flatten(2), 3, 2)",
    "matrix_norm had no rule": "torch.linalg.matrix_norm(x), torch.linalg.matrix_norm(x, float('inf'), keepdim=True)",
    "huber's weights divide by the count": f"F.huber_loss(x, x.detach() * .5, weight={W})",
    "l1's weights were ignored": f"F.l1_loss(x, x.detach() * .5, weight={W})",
    "the same in its other reductions": (
        f"F.l1_loss(x, x * .5, weight={W}, reduction='sum'), F.l1_loss(x, x * .5, weight={W}, reduction='none')"
    ),
    "l1's weights were ignored where they are sharded": "F.l1_loss(x, x.detach() * .5, weight=x.detach().abs())",
    "mse's weights": f"F.mse_loss(x, x.detach() * .5, weight={W})",
    "repeat with a 0": "x.repeat(1, 1, 0, 1), x.repeat(0, 1, 1, 1, 1), torch.tile(x, (0, 2))",
    "tensor_split by a tensor": "x.tensor_split(torch.tensor([2, 5]), 2), x.tensor_split(torch.tensor(3), 3)",
    "positions of a condition that no rank holds a part of": (
        "(lambda m: [m.__setitem__(torch.where(m.sum(-1) > 0), 1.), m * x.sum()][1])(x.mean((0, 2)).detach())"
    ),
    "norms with sharded weights": (
        "F.rms_norm(x, (4, 13, 11), x[0]), F.rms_norm(x[..., 0, :], (11,), x[0, 0, 0]), "
        "F.layer_norm(x, (13, 11), x[0, 0], x[0, 1])"
    ),
}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str, grid: Grid) -> None:
    holds(Expr(RESULTS[name]), image(2, 4, 13, 11), grid)


INPLACE = {
    "a transposed convolution": "F.conv_transpose2d(x, image(4, 3, 3, 3), stride=2, padding=1).relu_()",
    "bilinear pixels": "(lambda y: [y.add_(y * 2), y.relu_()][1])(F.interpolate(x, scale_factor=2, mode='bilinear'))",
    "a slice of them": (
        "(lambda y: [y[:, :, 3:20:2].mul_(2), y[:, 1].add_(y[:, 0]), y][2])(F.interpolate(x, scale_factor=2))"
    ),
    "shuffled pixels": "F.pixel_shuffle(x, 2).sigmoid_()",
    "a fold of patches": "F.fold(F.unfold(x, 3, padding=1), (13, 11), 3, padding=1).relu_()",
    "slices of slices": "(lambda y: [y[:, :, 2:9][:, :, 3:].mul_(.5), y[:, :, 4:5].add_(1), y][2])(x * 1)",
    "positions of another slice": "(lambda y: [y[:, :, 2:9, 1:5].add_(y[:, :, 2:9, 5:9]), y][1])(x * 1)",
    "detached values": "(lambda y: [y.detach()[:, :, 3:].fill_(.7), y * x][1])(x * 1)",
}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", INPLACE)
def test_writes_in_place(name: str, grid: Grid) -> None:
    """They ended in «Output 0 of _CutOut is a view and is being modified inplace»."""
    holds(Expr(INPLACE[name]), image(2, 4, 13, 11), grid)


REFUSED = {
    "x.add_(x[:, :1])": "reads a view of the same memory",
    "x.addcmul_(x[:, :1], x[:, 1:2])": "reads a view of the same memory",
    "x[:, :2].mul_(x[:, 1:3])": "reads a view of the same memory",
    "torch.linalg.norm(x, 2, (2, 3))": "singular values",
    "F.pad(x, (0, 0, -13, 15), mode='replicate')": "crops all positions",
    "F.pad(x, (-15, 20, 0, 0), mode='replicate')": "pad",
}


def refused(code: str) -> Tensor:
    return Expr(code)(Grid((1, 2)).shard(image(2, 4, 13, 11)))


@pytest.mark.parametrize("code", REFUSED)
def test_refused_by_name(code: str) -> None:
    raises(REFUSED[code], MuralError, refused, code)


class Deep(nn.Module):
    """What MONAI's SegResNetDS does: the decoder adds skips in place to what it has scaled up."""

    def __init__(self, up: nn.Module):
        super().__init__()
        self.first, self.down, self.up = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1), up

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        y = self.up(torch.relu(self.down(skip)))
        y += skip
        return y


@pytest.mark.parametrize(
    "up",
    [nn.ConvTranspose2d(8, 4, 3, 2, 1, 1, bias=False), nn.Sequential(nn.Conv2d(8, 4, 1), nn.Upsample(scale_factor=2))],
)
def test_skips_added_in_place(up: nn.Module) -> None:
    for grid in GRIDS:
        holds(Deep(up).double(), image(2, 4, 12, 16), grid)


def scripted_l1() -> float:
    x, l1 = torch.ones(3), cast("Any", nn.functional.l1_loss)
    return float(torch.jit.script(nn.L1Loss())(x, x * 2)) + float(l1(x, x * 2, weight=x))


def test_a_mended_l1_loss_is_torchs_elsewhere() -> None:
    assert run_on(2, scripted_l1) == [2.0, 2.0]


def sharded_oddity(code: str) -> Tensor:
    return Grid((1, 2)).shard(eval(code, {"torch": torch}))


@pytest.mark.parametrize("code", ["torch.eye(4).to_sparse()", "torch.eye(4).to_sparse_csr()", "nested"])
def test_tensors_that_are_not_dense(code: str) -> None:
    """Their pieces were taken by strides, which they do not have."""
    code = "torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])" if code == "nested" else code
    raises("dense", MuralError, sharded_oddity, code)
