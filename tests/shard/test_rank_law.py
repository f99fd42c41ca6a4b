"""The rank law with drawn cases: layer arguments, image sizes, cuts and grids for every windowed operation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from law import Grid, holds, image

GRIDS = {
    1: [(1,), (2,), (3,), (4,)],
    2: [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (4, 1), (1, 3)],
    3: [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (3, 1, 1)],
}
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
few = settings(max_examples=settings().max_examples, suppress_health_check=list(HealthCheck))


@st.composite
def cut_images(draw: st.DrawFn) -> tuple[torch.Tensor, Grid]:
    """An image of 1 to 3 dims and a grid that cuts it, evenly, by weights or by hand."""
    dims = draw(st.sampled_from([1, 2, 2, 2, 3]))
    spatial = draw(st.sampled_from(GRIDS[dims]))
    low, high = {1: (4, 40), 2: (3, 23), 3: (3, 11)}[dims]
    extents = [draw(st.integers(low, high)) for _ in range(dims)]
    data = (
        draw(st.sampled_from([1, 1, 2])) if max(spatial) * len(spatial) <= 3 and sum(s > 1 for s in spatial) == 1 else 1
    )
    if data * torch.tensor(spatial).prod() > 4:
        data = 1
    batch = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["even", "even", "by hand", "weighted", "aligned"]))
    cuts = None
    if kind == "by hand":
        cuts = []
        for n, extent in zip(spatial, extents, strict=True):
            inner = sorted(draw(st.lists(st.integers(0, extent), min_size=n - 1, max_size=n - 1)))
            cuts.append((0, *inner, extent))
    elif kind == "weighted":
        cuts = [tuple(draw(st.floats(0.1, 3.0)) for _ in range(n)) for n in spatial]
    align = draw(st.sampled_from([2, 4])) if kind == "aligned" else 1
    x = image(batch, 4, *extents, seed=draw(st.integers(0, 99)))
    if draw(st.booleans()) and dims == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, Grid(spatial, data, tuple(cuts) if cuts else None, align=align)


def per_dim(low: int, high: int, dims: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(low, high)] * dims)


def legal(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether torch itself takes the case."""
    try:
        with torch.no_grad():
            return module(x).numel() > 0
    except (RuntimeError, ValueError):
        return False


@few
@given(st.data(), cut_images())
def test_convolution(data: st.DataObject, case: tuple[torch.Tensor, Grid]) -> None:
    x, grid = case
    dims = x.ndim - 2
    mode = data.draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    kernel, dilation = data.draw(per_dim(1, 5, dims)), data.draw(per_dim(1, 3, dims))
    padding = data.draw(st.one_of(st.sampled_from(["same", "valid"]), per_dim(0, 4, dims)))
    stride = (1,) * dims if padding == "same" else data.draw(per_dim(1, 4, dims))
    groups = data.draw(st.sampled_from([1, 2, 4]))
    module = CONV[dims](
        4, 4, kernel, stride, padding, dilation, groups, bias=data.draw(st.booleans()), padding_mode=mode
    ).double()
    assume(legal(module, x))
    holds(module, x, grid)


@few
@given(st.data(), cut_images())
def test_transposed_convolution(data: st.DataObject, case: tuple[torch.Tensor, Grid]) -> None:
    x, grid = case
    dims = x.ndim - 2
    stride, dilation = data.draw(per_dim(1, 3, dims)), data.draw(per_dim(1, 2, dims))
    more = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    module = TRANSPOSED[dims](
        4, 2, data.draw(per_dim(1, 4, dims)), stride, data.draw(per_dim(0, 2, dims)), more,
        data.draw(st.sampled_from([1, 2])), data.draw(st.booleans()), dilation,
    ).double()  # fmt: skip
    assume(legal(module, x))
    holds(module, x, grid)


@few
@given(st.data(), cut_images())
def test_pooling(data: st.DataObject, case: tuple[torch.Tensor, Grid]) -> None:
    x, grid = case
    dims = x.ndim - 2
    kernel = data.draw(per_dim(1, 4, dims))
    stride = data.draw(st.none() | per_dim(1, 4, dims))
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    ceil = data.draw(st.booleans())
    if data.draw(st.booleans()):
        module: nn.Module = MAX[dims](kernel, stride, padding, data.draw(per_dim(1, 2, dims)), ceil_mode=ceil)
    else:
        more = {} if dims == 1 else {"divisor_override": data.draw(st.none() | st.integers(1, 5))}
        module = AVG[dims](kernel, stride, padding, ceil, data.draw(st.booleans()), **more)
    assume(legal(module, x) and bool(module(x).isfinite().all()))
    holds(module, x, grid)


@few
@given(st.data(), cut_images())
def test_adaptive_pooling_and_interpolation(data: st.DataObject, case: tuple[torch.Tensor, Grid]) -> None:
    x, grid = case
    dims = x.ndim - 2
    size = data.draw(per_dim(1, 12, dims))
    kind = data.draw(st.sampled_from(["avg", "max", "nearest", "nearest-exact", "linear", "bicubic", "area"]))
    if kind in ("avg", "max"):
        module: nn.Module = getattr(nn, f"Adaptive{kind.title()}Pool{dims}d")(size)
    elif kind == "bicubic" and dims != 2:
        return
    else:
        mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[dims] if kind == "linear" else kind
        align = data.draw(st.booleans()) if kind in ("linear", "bicubic") else None
        by_factor = data.draw(st.booleans()) and kind in ("linear", "area")
        factor = tuple(data.draw(st.sampled_from([0.5, 1.5, 2.0, 3.0])) for _ in range(dims))
        module = nn.Upsample(None if by_factor else size, factor if by_factor else None, mode, align)
    assume(legal(module, x))
    holds(module, x, grid)


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([(3, 2), (2, 3), (6, 1), (2, 4), (8, 1), (2, 2, 2)]))
def test_chains_on_six_and_eight_ranks(data: st.DataObject, spatial: tuple[int, ...]) -> None:
    dims = len(spatial)
    extents = [data.draw(st.integers(16, 33 if dims == 2 else 20)) for _ in spatial]
    kernel, stride = data.draw(per_dim(1, 5, dims)), data.draw(per_dim(1, 2, dims))
    module = nn.Sequential(
        # A bias in front of a norm has no gradient but rounding.
        CONV[dims](4, 4, kernel, stride, tuple(k // 2 for k in kernel), bias=False),
        (nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d)(4),
        nn.ReLU(),
        MAX[dims](3, 2, 1),
        CONV[dims](4, 4, 3, 1, 2, 2),
        TRANSPOSED[dims](4, 4, 2, 2),
    ).double()
    holds(module, image(1, 4, *extents), Grid(spatial))
