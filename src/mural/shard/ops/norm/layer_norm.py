"""Layer norm, root-mean-square norm and unit vectors, over dims that are cut or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.comm import mark, stack
from mural.comm.exchange import first_order
from mural.errors import LayoutError, UnsupportedOp
from mural.ranks import Mesh
from mural.shard.autocasting import without_autocast
from mural.shard.ops.call_arguments import bound, dims_of
from mural.shard.ops.norm.normalized_rows import merge_moments
from mural.shard.ops.norm.whole_image import result_dtype
from mural.shard.ops.pointwise.along_dim import along
from mural.shard.ops.pointwise.elementwise import common_layout, piece_of
from mural.shard.relayout import merged
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor


class _LayerNorm(torch.autograd.Function):
    """y = (x − mean) · rstd · weight + bias, the moments over `dims` here and on the ranks of `peers`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: tuple[int, ...], eps: float, mesh: Mesh,
        peers: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
        count = prod(x.shape[d] for d in dims)
        mean = square = x.new_zeros(shape)
        if x.numel():
            variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
            square = variance * count
        mine = torch.stack([torch.full_like(mean, count), mean, square])
        total, mean, square = merge_moments(stack(mine, peers, mesh.rank, mesh.transport, "norm statistics"))
        rstd = torch.rsqrt(square / total + eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.dims, ctx.mesh, ctx.peers, ctx.count = dims, mesh, peers, total
        y = (x - mean) * rstd
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        hat = (x - mean) * rstd
        of_weight = None if weight is None else (grad * hat).sum_to_size(weight.shape)
        of_bias = None if bias is None else grad.sum_to_size(bias.shape)
        of_x = None
        if ctx.needs_input_grad[0]:
            scaled = grad if weight is None else grad * weight
            sums = torch.stack([scaled.sum(ctx.dims, keepdim=True), (scaled * hat).sum(ctx.dims, keepdim=True)])
            total = stack(sums, ctx.peers, ctx.mesh.rank, ctx.mesh.transport, "norm statistics backward").sum(0)
            of_x = hat.mul_(-total[1] / ctx.count).add_(scaled).sub_(total[0] / ctx.count).mul_(rstd)
        return of_x, of_weight, of_bias, None, None, None, None


def last_dims(
    x: ShardedTensor, shape: Sequence[int], parameters: Mapping[str, Tensor | None], name: str
) -> tuple[int, ...]:
    """The dims of a norm; raises unless they and the parameters have that shape."""
    if not shape or tuple(x.shape[x.ndim - len(shape) :]) != tuple(shape):
        raise RuntimeError(f"{name}: normalized_shape {tuple(shape)} is not the end of the shape {tuple(x.shape)}")
    for what, parameter in parameters.items():
        if parameter is not None and tuple(parameter.shape) != tuple(shape):
            raise RuntimeError(f"{name}: a {what} of shape {tuple(parameter.shape)} for {tuple(shape)}")
    return tuple(range(x.ndim - len(shape), x.ndim))


@register("reduction", "layer_norm")
def layer_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Layer norm over the last dims; local if none of them is cut."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    x, shape, weight, bias, eps = bound(args, kwargs, names, None, None, 1e-5)
    dims = last_dims(x, shape, {"weight": weight, "bias": bias}, "layer_norm")
    axes = x.placement.axes_of(dims)
    affine = [None if p is None else piece_of(p, x.placement, "layer_norm") for p in (weight, bias)]
    if not axes:
        return ShardedTensor(func(x.local, shape, *affine, eps), x.placement)
    dtype = result_dtype(func, x.local, affine[0])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with without_autocast(x.device):
        local: Tensor = _LayerNorm.apply(x.local.to(wide), *affine, dims, eps, x.mesh, x.mesh.peers(axes))  # type: ignore[assignment]
    mark()
    return ShardedTensor(local.to(dtype), x.placement)


@register("reduction", "rms_norm")
def rms_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Root-mean-square norm over the last dims; local if none of them is cut."""
    x, shape, weight, eps = bound(args, kwargs, ("input", "normalized_shape", "weight", "eps"), None, None)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dims = last_dims(x, shape, {"weight": weight}, "rms_norm")
    axes = x.placement.axes_of(dims)
    weight = None if weight is None else piece_of(weight, x.placement, "rms_norm")
    if not axes:
        return ShardedTensor(func(x.local, shape, weight, eps), x.placement)
    dtype = result_dtype(func, x.local, weight)
    values = x.local.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    squares = merged(values.square().sum(dims, keepdim=True), x.mesh, axes, "norm statistics")
    least = torch.finfo(values.dtype).eps if eps is None else eps
    local = values * torch.rsqrt(squares / prod(shape) + least)
    return ShardedTensor((local if weight is None else local * weight).to(dtype), x.placement)


@register("reduction", "normalize")
def normalize(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Unit vectors."""
    x, p, dim, eps, out = bound(args, kwargs, ("input", "p", "dim", "eps", "out"), 2.0, 1, 1e-12, None)
    if out is not None:
        raise LayoutError("normalize(out=…) is not supported for sharded tensors: use its result")
    if not x.placement.axes_of(dims_of(dim, x.ndim, "normalize")):
        return along(func, (x, p, dim, eps), {})
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps)


@register("reduction", "cosine_similarity")
def cosine_similarity(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cosine of the angle between vectors; as in torch, a length below `eps` is clamped, without a gradient."""
    x, y, dim, eps = bound(args, kwargs, ("x1", "x2", "dim", "eps"), 1, 1e-8)
    layout = common_layout(func, (x, y))
    dims = dims_of(dim, layout.ndim, "cosine_similarity")
    if not layout.axes_of(dims):
        return along(func, (x, y, dims[0], eps), {})
    kind = func(*(torch.ones((1, 1), dtype=t.dtype, device=t.device) for t in (x, y))).dtype  # autocast may change it
    x, y = x.to(kind).expand(layout.shape), y.to(kind).expand(layout.shape)
    return (x / at_least(x.norm(2, dims, keepdim=True), eps) * (y / at_least(y.norm(2, dims, keepdim=True), eps))).sum(
        dims
    )


def at_least(length: Tensor, eps: float) -> Tensor:
    """The length, clamped to at least `eps` in value only: its gradient stays."""
    return length + (length.clamp_min(eps) - length).detach()


@register("along a dim", "local_response_norm")
def local_response_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Each channel over the energy of its neighbouring channels, which are not cut."""
    x: ShardedTensor = args[0]
    if x.placement.is_cut(1):
        raise UnsupportedOp(
            f"local_response_norm of a sharded tensor of shape {tuple(x.shape)} whose channels (dim 1) are cut: call "
            f".full() first, or shard other dims"
        )
    local = func(x.local, *args[1:], **kwargs)
    if not local.is_floating_point():  # of nothing, torch returns whole numbers as they are
        local = local.to(torch.get_default_dtype())
    return ShardedTensor(local, x.placement)
