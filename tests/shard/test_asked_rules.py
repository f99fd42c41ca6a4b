"""Operations that models asked for, under the law: root-mean-square norms, repeats, histograms, gathering by index."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mural
from law import Expr, Grid, holds, image, raises, some
from ranks import run_on

GRIDS = [Grid((2, 2)), Grid((1, 2), data=2), Grid((2, 1), cuts=((3, 10),)), Grid((3, 1), cuts=((0, 9, 4),))]

NORMS = """
F.rms_norm(x, (11,))
F.rms_norm(x, (11,), image(11))
F.rms_norm(x, [13, 11], image(13, 11), 0.1)
F.rms_norm(x, (4, 13, 11), None, 1e-5)
torch.rms_norm(x, (2, 4, 13, 11))
F.rms_norm(x.permute(0, 2, 3, 1), (4,), image(4), eps=1e-6)
F.rms_norm(x.flatten(2).transpose(1, 2), (4,), image(4))
F.rms_norm(x.flatten(2), (143,), image(143))
F.rms_norm(x * 1e-9, (13, 11))
F.rms_norm(input=x, normalized_shape=(11,), weight=None)
""".strip().splitlines()

REPEATS = """
x.repeat_interleave(2, 1)
x.repeat_interleave(3, 2)
x.repeat_interleave(2, dim=-1)
torch.repeat_interleave(x, 2, 0)
x.repeat_interleave(1, 2)
x.repeat_interleave(0, 2).sum() + x
x.repeat_interleave(torch.tensor(2), 2)
x.repeat_interleave(torch.tensor([3]), 3)
x.repeat_interleave(torch.arange(13) % 3, 2)
x.repeat_interleave(torch.tensor([0, 2, 1, 4]), dim=1, output_size=7)
torch.repeat_interleave(x, repeats=torch.tensor([2, 1]), dim=0)
x.repeat_interleave(2)
x.repeat_interleave(torch.arange(1144) % 2)
x.repeat_interleave(2, 2).repeat_interleave(2, 3) - F.interpolate(x, scale_factor=2)
F.conv2d(x.repeat_interleave(2, 2), image(3, 4, 3, 3), padding=1)
x.flatten(2).repeat_interleave(3, 1)
x.flatten(2).repeat_interleave(2, 2)
x.repeat_interleave((x[0, 0, :, 0] > 0).long(), 2)
""".strip().splitlines()

HISTOGRAMS = """
torch.histc(x)
x.histc(7)
torch.histc(x, bins=5, min=-1, max=1)
x.histc(3, -1.0)
x.histc(10, max=0.5, min=-0.5)
torch.histc(x * 0 + 2, 4)
torch.histc(x, 4, 1, 1)
torch.histc(x.float(), 9)
torch.histc(x[:, :, :0], 4)
torch.histc(x.flatten(2), 6)
torch.histc(x[:, :, 3:5], 6)
""".strip().splitlines()

PICKS = """
x.gather(1, x.argsort(1))
x.gather(1, x.argmax(1, keepdim=True))
x.gather(2, x.argmax(2, keepdim=True))
x.gather(2, x.argsort(2))
torch.gather(x, 3, x.argmin(3, keepdim=True))
x.gather(1, (image(2, 2, 13, 11) > 0).long())
x.gather(1, (image(2, 2, 5, 4) > 0).long())
x.gather(2, (image(2, 3, 6, 11) > 0).long() * 12)
x.gather(1, (x[:, :2, 3:9] > 0).long())
x.gather(0, (image(1, 4, 13, 11) > 0).long())
torch.gather(input=x, dim=1, index=(x > 0).long())
x.flatten(2).gather(2, (x > 0).long().flatten(2) * 100)
x.flatten(2).transpose(1, 2).gather(1, (image(2, 5, 4) > 0).long() * 77)
x.scatter(1, (image(2, 4, 13, 11) > 0).long(), y)
x.scatter_add(1, (y > 0).long(), x * 2)
""".strip().splitlines()


@pytest.mark.parametrize("grid", some(GRIDS, 1, 2), ids=str)
@pytest.mark.parametrize("code", NORMS + REPEATS)
def test_norms_and_repeats(code: str, grid: Grid) -> None:
    holds(Expr(code), image(2, 4, 13, 11), grid)


@pytest.mark.parametrize("grid", some(GRIDS, 1, 2), ids=str)
@pytest.mark.parametrize("code", PICKS)
def test_picking_along_a_dim(code: str, grid: Grid) -> None:
    holds(Expr(code), [image(2, 4, 13, 11), image(2, 4, 13, 11, seed=1)], grid)


@pytest.mark.parametrize("grid", some(GRIDS, 1, 2), ids=str)
@pytest.mark.parametrize("code", HISTOGRAMS)
def test_histograms(code: str, grid: Grid) -> None:
    holds(Expr(code), image(2, 4, 13, 11), grid, needs_grad=False)


@pytest.mark.parametrize("grid", [Grid((2, 1)), Grid((1, 2), data=2)], ids=str)
def test_rms_norm_layers(grid: Grid) -> None:
    tokens = nn.Sequential(nn.Flatten(2), nn.Linear(143, 6), nn.RMSNorm(6))
    holds(
        nn.Sequential(nn.RMSNorm((13, 11)), nn.Conv2d(4, 3, 3), nn.RMSNorm(9, eps=0.1)).double(),
        image(2, 4, 13, 11),
        grid,
    )
    holds(nn.Sequential(tokens, nn.RMSNorm((4, 6), elementwise_affine=False)).double(), image(2, 4, 13, 11), grid)


def low_precision(dtype: torch.dtype, autocast: bool) -> float:
    """The largest difference of a norm over a cut dim from torch's, in units of the type's rounding; types agree."""
    x, weight = image(2, 4, 13, 11).to(dtype), image(11).to(dtype)
    y = Grid((1, 2)).shard(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, got = F.rms_norm(x, (11,), weight), F.rms_norm(y, (11,), weight)
    assert got.dtype == expected.dtype
    gap = (got.full().double() - expected.double()).abs().max()
    return float(gap / expected.double().abs().max() / torch.finfo(expected.dtype).eps)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_rms_norm_in_other_types(dtype: torch.dtype, autocast: bool) -> None:
    assert max(run_on(2, low_precision, dtype, autocast)) <= 2


@settings(suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([(2, 1), (1, 2), (3, 1), (2, 2)]))
def test_repeats_of_drawn_images(data: st.DataObject, spatial: tuple[int, int]) -> None:
    shape = (data.draw(st.integers(1, 3)), 2, *(data.draw(st.integers(1, 9)) for _ in range(2)))
    dim = data.draw(st.integers(0, 3))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=shape[dim], max_size=shape[dim]))
    holds(Expr(f"x.repeat_interleave(torch.tensor({counts}), {dim}).sum(1) * 1.5"), image(*shape), Grid(spatial))


def evaluated(code: str, dims: tuple[int, int] = (2, 1)) -> None:
    x = Grid(dims).shard(image(2, 4, 13, 11).requires_grad_())
    found: Tensor = Expr(code)(x)
    if found.requires_grad:
        found.sum().backward()


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("F.rms_norm(x, (12,))", RuntimeError, "normalized_shape"),
        ("F.rms_norm(x, (11,), image(12))", RuntimeError, "weight"),
        ("x.repeat_interleave(torch.tensor([1, 2]), 2)", RuntimeError, "repeats"),
        ("x.repeat_interleave(-1, 2)", RuntimeError, "negative"),
        ("x.repeat_interleave(2, 2, output_size=3)", RuntimeError, "output_size"),
        ("torch.repeat_interleave(x[0, 0, :, 0].long())", mural.UnsupportedOp, "repeat_interleave"),
        ("torch.histc(x, 0)", RuntimeError, "bins"),
        ("torch.histc(x, 4, 2, 1)", RuntimeError, "max"),
        ("torch.histc(x / 0, 4)", RuntimeError, "finite"),
        ("torch.histc(x.long(), 4)", RuntimeError, "histogram"),
    ],
)
def test_wrong_arguments_are_refused_on_every_rank(code: str, kind: type[Exception], text: str) -> None:
    raises(text, kind, evaluated, code)


@pytest.mark.parametrize(
    "code",
    [
        "x.scatter(2, (x > 0).long(), 1.0)",
        "x.scatter(1, (image(2, 4, 5, 11) > 0).long(), 1.0)",
        "x.repeat_interleave(4000, 2).gather(2, (image(2, 4, 1, 11) > 0).long())",
    ],
)
def test_picks_that_are_refused_name_shapes_and_a_remedy(code: str) -> None:
    for text in ("scatter" if "scatter" in code else "gather", "shape (2, 4, ", "index of shape (2, 4, ", ".full()"):
        raises(text, mural.UnsupportedOp, evaluated, code)
