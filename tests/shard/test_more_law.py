"""The rank law with drawn cases for pools with positions, unpools, patches, sampling, scans and the largest values."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_rank_law import cut_images, per_dim
from torch import Tensor, nn
from torch.nn import functional as F

from law import Grid, holds, image

few = settings(max_examples=max(20, settings().max_examples // 2), suppress_health_check=list(HealthCheck))
Case = tuple[Tensor, Grid]


class Call(nn.Module):
    """A function of `torch.nn.functional` (or a method of tensors) with arguments; torch itself says what is legal."""

    def __init__(self, name: str, *args: object, **kwargs: object):
        super().__init__()
        self.name, self.args, self.kwargs = name, args, kwargs

    def forward(self, x: Tensor) -> object:
        if "pool" in self.name:
            return getattr(F, self.name)(x, *self.args, **self.kwargs)
        return getattr(x, self.name)(*self.args, **self.kwargs)

    def legal(self, x: Tensor) -> bool:
        """Whether torch takes the case, and it has a result."""
        try:
            with torch.no_grad():
                result = self(x)
        except (RuntimeError, ValueError):
            return False
        return all(r.numel() > 0 for r in (result if isinstance(result, tuple) else (result,)))


class Unpool(nn.Module):
    """A pool, something in between, and the unpool to the pool's input."""

    def __init__(self, dims: int, kernel: object, stride: object, padding: object, factor: float):
        super().__init__()
        self.dims, self.arguments, self.factor = dims, (kernel, stride, padding), factor

    def forward(self, x: Tensor) -> Tensor:
        pool, unpool = getattr(F, f"max_pool{self.dims}d"), getattr(F, f"max_unpool{self.dims}d")
        y, index = pool(x, *self.arguments, return_indices=True)
        return unpool(y * self.factor, index, *self.arguments, output_size=x.shape)


class Patches(nn.Module):
    """An image unfolded, weighted and folded again."""

    def __init__(self, *arguments: object, weighted: bool):
        super().__init__()
        self.arguments, self.weighted = arguments, weighted

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, *self.arguments)
        if self.weighted:
            columns = columns * torch.linspace(0.5, 2, columns.shape[1], dtype=x.dtype).view(-1, 1)
        return F.fold(columns, tuple(x.shape[-2:]), *self.arguments)


class Sampled(nn.Module):
    """An image sampled under an affine map, or at points that a convolution of it gives."""

    def __init__(self, theta: Tensor, outs: tuple[int, ...], mode: str, padding: str, align: bool, learned: bool):
        super().__init__()
        self.theta, self.outs, self.mode, self.padding, self.align = nn.Parameter(theta), outs, mode, padding, align
        self.learned = learned

    def forward(self, x: Tensor) -> Tensor:
        points = F.affine_grid(self.theta.expand(x.shape[0], -1, -1), [*x.shape[:2], *self.outs], self.align)
        if self.learned:  # a flow: positions of the image's own pixels, moved by what the image says
            moved = x[:, : len(self.outs)].movedim(1, -1) * 0.2
            points = moved + F.affine_grid(self.theta.expand(x.shape[0], -1, -1), list(x.shape), self.align)
        return F.grid_sample(x, points, self.mode, self.padding, self.align)


@few
@given(st.data(), cut_images())
def test_max_pooling_with_indices(data: st.DataObject, case: Case) -> None:
    x, grid = case
    dims = x.ndim - 2
    x = x if data.draw(st.booleans()) else x.round()
    if data.draw(st.booleans()):
        module = Call(f"adaptive_max_pool{dims}d", data.draw(per_dim(1, 9, dims)), return_indices=True)
    else:
        kernel, stride = data.draw(per_dim(1, 4, dims)), data.draw(per_dim(1, 4, dims))
        padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
        dilation, ceil = data.draw(per_dim(1, 2, dims)), data.draw(st.booleans())
        module = Call(f"max_pool{dims}d", kernel, stride, padding, dilation, ceil_mode=ceil, return_indices=True)
    assume(module.legal(x))
    holds(module, x, grid)


@few
@given(st.data(), cut_images())
def test_unpooling(data: st.DataObject, case: Case) -> None:
    x, grid = case
    dims = x.ndim - 2
    kernel = data.draw(per_dim(1, 4, dims))
    stride = tuple(data.draw(st.integers(1, k)) for k in kernel)
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    module = Unpool(dims, kernel, stride, padding, data.draw(st.sampled_from([1.0, 2.5])))
    try:
        module(x)
    except (RuntimeError, ValueError):
        assume(False)
    holds(module, x, grid)


@few
@given(st.data(), cut_images())
def test_patches(data: st.DataObject, case: Case) -> None:
    x, grid = case
    if x.ndim == 4 and data.draw(st.booleans()):
        kernel, dilation = data.draw(per_dim(1, 4, 2)), data.draw(per_dim(1, 3, 2))
        padding, stride = data.draw(per_dim(0, 3, 2)), data.draw(per_dim(1, 4, 2))
        module: nn.Module = Patches(kernel, dilation, padding, stride, weighted=data.draw(st.booleans()))
        try:
            module(x)
        except RuntimeError:
            assume(False)
    else:
        dim = data.draw(st.integers(0, x.ndim - 1))
        if data.draw(st.booleans()):
            size = data.draw(st.integers(1, x.shape[dim]))
            module = Call("diff", min(size, 3), dim)
            if data.draw(st.booleans()):
                module = Call("unfold", dim, size, data.draw(st.integers(1, 4)))
        else:
            module = Call("topk", data.draw(st.integers(1, x.shape[dim])), dim, data.draw(st.booleans()))
        if isinstance(module, Call):
            assume(module.legal(x))
    holds(module, x, grid)


@few
@given(st.data(), cut_images())
def test_scans(data: st.DataObject, case: Case) -> None:
    x, grid = case
    name = data.draw(st.sampled_from(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"]))
    x = x.round() if name in ("cummax", "cummin") and data.draw(st.booleans()) else x
    if name == "cumprod" and data.draw(st.booleans()):
        x = x * (x.abs() > 0.1)  # zeros: the gradient of a product with them is not its ratio
    holds(Call(name, data.draw(st.integers(0, x.ndim - 1))), x, grid)


@few
@given(st.data(), cut_images())
def test_sampling(data: st.DataObject, case: Case) -> None:
    x, grid = case
    dims = x.ndim - 2
    assume(dims > 1)
    modes = ["bilinear", "nearest"] + (["bicubic"] if dims == 2 else [])
    theta = torch.eye(dims, dims + 1, dtype=torch.float64)
    theta += data.draw(st.sampled_from([0.0, 0.1, 1.5])) * image(dims, dims + 1, seed=data.draw(st.integers(0, 99)))
    mode, padding = data.draw(st.sampled_from(modes)), data.draw(st.sampled_from(["zeros", "border", "reflection"]))
    outs, align, learned = data.draw(per_dim(1, 17, dims)), data.draw(st.booleans()), data.draw(st.booleans())
    module = Sampled(theta, outs, mode, padding, align, learned)
    holds(module, x, grid)
