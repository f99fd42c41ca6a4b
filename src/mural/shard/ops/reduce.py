"""Reductions: sums, means, extremes and softmax over dims, cut or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mural.comm import Mesh, mark
from mural.errors import UnsupportedOp
from mural.shard.ops.pointwise import common_layout, piece_of
from mural.shard.ops.views import bound, dim_of
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor, merged, stacked


def dims_of(dim: Any, ndim: int, name: str) -> tuple[int, ...]:
    """The dims that a reduction runs over; none given means all."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    return tuple(dim_of(d, ndim, name) for d in ((dim,) if isinstance(dim, int) else dim))


def reduced(x: ShardedTensor, local: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A result, the same on all ranks along the reduced dims, in the layout of what remains.

    `local` has the reduced dims as extent 1.
    """
    layout = x.placement.gathered(dims)
    for d in dims:
        layout = layout.with_cut(d, None, 1)
    if not keepdim:
        keep = [d for d in range(layout.ndim) if d not in dims]
        local = local.reshape([local.shape[d] for d in keep])
        layout = layout.pick(keep, [layout.shape[d] for d in keep])
    return ShardedTensor(local, layout) if layout.ndim else local


def total(x: ShardedTensor, local: Tensor, dims: Sequence[int], name: str) -> Tensor:
    """A local sum over dims, added up over the ranks that share those dims."""
    return merged(local, x.mesh, x.placement.axes_of(dims), name)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@register("reduction", "sum", "mean", "nansum", "nanmean", "count_nonzero")
def sums(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Sums and means over the global positions."""
    name = name_of(func)
    x, dim, keepdim, dtype = bound(args, kwargs, ("input", "dim", "keepdim", "dtype"), None, False, None)
    dims = dims_of(dim, x.ndim, name)
    probe = (torch.sum if name != "count_nonzero" else torch.count_nonzero)(x.local[(slice(0, 1),) * x.ndim])
    if name in ("mean", "nanmean") and not (dtype or x.dtype).is_floating_point and not (dtype or x.dtype).is_complex:
        raise RuntimeError(f"{name} needs a floating point tensor, not {x.dtype}: call .float() first")
    result = dtype or (probe.dtype if name not in ("mean", "nanmean") else torch.mean(x.local.new_zeros(1)).dtype)
    values = x.local
    if name in ("nansum", "nanmean"):
        values = torch.nan_to_num(values, 0.0, float("inf"), float("-inf"))
    if name == "count_nonzero":
        values = values != 0
    local = torch.sum(values, dims, keepdim=True, dtype=wide(result))
    local = total(x, local, dims, name)
    if name == "mean":
        local = local / prod(x.shape[d] for d in dims)
    elif name == "nanmean":
        valid = torch.sum(~torch.isnan(x.local), dims, keepdim=True, dtype=wide(result))
        local = local / total(x, valid, dims, name)
    return reduced(x, local.to(result), dims, keepdim)


@register("reduction", "var", "std", "var_mean", "std_mean")
def spreads(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Variances in two passes: the mean, then the squares of the differences from it."""
    name = name_of(func)
    x, *rest = args
    given = dict(kwargs)
    if rest and isinstance(rest[0], bool):  # the old form: var(x, unbiased)
        given["unbiased"], rest = rest[0], rest[1:]
    names = ("dim", "unbiased", "keepdim") if len(rest) > 1 and isinstance(rest[1], bool) else ("dim", "keepdim")
    given |= dict(zip(names, rest, strict=False))
    correction = given.get("correction", None)
    if correction is None:
        correction = int(given.get("unbiased", True) is not False)
    dims = dims_of(given.get("dim"), x.ndim, name)
    count = prod(x.shape[d] for d in dims)
    values = x.local.to(wide(x.dtype))
    mean = total(x, values.sum(dims, keepdim=True), dims, name) / count
    variance = total(x, (values - mean).square().sum(dims, keepdim=True), dims, name) / max(0, count - correction)
    if name.startswith("std"):  # the root's gradient at zero is zero, as torch's
        filled = variance > 0
        variance = torch.where(filled, torch.where(filled, variance, 1.0).sqrt(), variance * 0)
    spread = variance.to(x.dtype)
    keep = bool(given.get("keepdim", False))
    if name.endswith("mean"):
        return reduced(x, spread, dims, keep), reduced(x, mean.to(x.dtype), dims, keep)
    return reduced(x, spread, dims, keep)


class _Share(torch.autograd.Function):
    """The global extreme; its gradient, from all ranks, goes evenly to the positions that attain it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, best: Tensor, count: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.save_for_backward(x, best, count)
        ctx.mesh, ctx.axes = mesh, axes
        return best.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, best, count = ctx.saved_tensors
        return (x == best) * (merged(grad, ctx.mesh, ctx.axes, "extreme backward") / count), None, None, None, None


def extreme_of(x: ShardedTensor, dims: Sequence[int], largest: bool, name: str) -> Tensor:
    """The largest (or smallest) value over dims, as a local tensor with those dims of extent 1."""
    axes, local = x.placement.axes_of(dims), x.local
    pick = torch.amax if largest else torch.amin
    with torch.no_grad():
        if any(local.shape[d] == 0 for d in dims):
            shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
            mine = local.new_full(shape, lowest(local.dtype, largest))
        else:
            mine = pick(local, tuple(dims), keepdim=True)
        best = pick(stacked(mine, x.mesh, axes, name), 0) if axes else mine
        if not local.requires_grad:
            return best
        count = merged((local == best).sum(tuple(dims), keepdim=True), x.mesh, axes, name)
    shared: Tensor = _Share.apply(local, best, count, x.mesh, axes)  # type: ignore[assignment]
    mark()
    return shared


@register("reduction", "amax", "amin")
def extremes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The largest or smallest value."""
    name = name_of(func)
    x, dim, keepdim = bound(args, kwargs, ("input", "dim", "keepdim"), None, False)
    dims = dims_of(dim, x.ndim, name)
    return reduced(x, extreme_of(x, dims, name == "amax", name), dims, keepdim)


@register("reduction", "norm", "vector_norm")
def norms(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The p-norm of all positions, or along dims; its gradient at zero is zero, as torch's."""
    name = name_of(func)
    order = "ord" if name == "vector_norm" else "p"
    x, p, dim, keepdim, dtype = bound(args, kwargs, ("input", order, "dim", "keepdim", "dtype"), 2, None, False, None)
    if p == "nuc":
        raise UnsupportedOp("the nuclear norm of a sharded tensor: call .full() first")
    p = 2.0 if p in ("fro", None) else float(p)
    dims = dims_of(dim, x.ndim, name)
    result = func(x.local.new_zeros(1), p, dtype=dtype).dtype
    size = ShardedTensor(x.local.abs().to(wide(result)), x.placement)
    if abs(p) == float("inf"):
        return reduced(x, extreme_of(size, dims, p > 0, name).to(result), dims, keepdim)
    powers = (size.local != 0).to(size.dtype) if p == 0 else size.local if p == 1 else size.local**p
    powered = total(x, powers.sum(dims, keepdim=True), dims, name)
    if p not in (0.0, 1.0):
        filled = powered != 0
        powered = torch.where(filled, torch.where(filled, powered, 1.0) ** (1 / p), 0.0)
    return reduced(x, powered.to(result), dims, keepdim)


@register("reduction", "max", "min")
def max_or_min(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`max(x)`, `max(x, dim)` with positions, `max(x, y)`."""
    name = name_of(func)
    other = next(iter(args[1:]), kwargs.get("other"))
    if isinstance(other, Tensor):
        first: Tensor = args[0]
        return torch.maximum(first, other) if name == "max" else torch.minimum(first, other)
    x, dim, keepdim = bound(args, kwargs, ("input", "dim", "keepdim"), None, False)
    if dim is None:
        dims = tuple(range(x.ndim))
        return reduced(x, extreme_of(x, dims, name == "max", name), dims, False)
    values, indices = extreme_along(x, dim_of(dim, x.ndim, name), name == "max", name)
    kind = torch.return_types.max if name == "max" else torch.return_types.min
    at = (dim_of(dim, x.ndim, name),)
    return kind((reduced(x, values, at, keepdim), reduced(x, indices, at, keepdim)))


def extreme_along(x: ShardedTensor, dim: int, largest: bool, name: str) -> tuple[Tensor, Tensor]:
    """Value and global position of the first extreme along one dim, which keeps an extent of 1."""
    pick = torch.max if largest else torch.min
    start = x.box[dim].start
    if x.local.shape[dim]:
        values, indices = pick(x.local, dim, keepdim=True)
        indices = indices + start
    else:
        shape = [1 if d == dim else n for d, n in enumerate(x.local.shape)]
        values = x.local.new_full(shape, lowest(x.dtype, largest))
        if values.is_floating_point():
            values = values + x.local.sum(dim, keepdim=True) * 0
        indices = torch.full(shape, torch.iinfo(torch.int64).max, device=x.device)
    axes = x.placement.axes_of((dim,))
    if not axes or x.mesh.size(axes[0]) == 1:
        return values, indices
    all_values, all_indices = stacked(values, x.mesh, axes, name), stacked(indices, x.mesh, axes, name)
    best = pick(all_values.detach(), 0, keepdim=True).values
    hit = same_value(all_values.detach(), best)
    place = torch.where(hit, all_indices, torch.iinfo(torch.int64).max).min(0, keepdim=True)
    return all_values.gather(0, place.indices)[0], place.values[0]


def same_value(values: Tensor, best: Tensor) -> Tensor:
    """Where values equal the best one, which may be NaN."""
    return (values == best) | (values.isnan() & best.isnan())


def lowest(dtype: torch.dtype, largest: bool) -> float | int:
    """The value that never wins a maximum (or minimum)."""
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    limits = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
    return limits.min if largest else min(limits.max, 1) if dtype == torch.bool else limits.max


@register("reduction", "argmax", "argmin")
def argument(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The global position of the first extreme along a dim."""
    name = name_of(func)
    x, dim, keepdim = bound(args, kwargs, ("input", "dim", "keepdim"), None, False)
    if dim is None:
        raise UnsupportedOp(f"{name} over all dims of a sharded tensor: give a dim, or call .full()")
    at = dim_of(dim, x.ndim, name)
    _, indices = extreme_along(x.detach(), at, name == "argmax", name)
    return reduced(x, indices, (at,), keepdim)


@register("reduction", "all", "any")
def truth(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Whether all or any positions are true."""
    name = name_of(func)
    x, dim, keepdim = bound(args, kwargs, ("input", "dim", "keepdim"), None, False)
    dims = dims_of(dim, x.ndim, name)
    wrong = x.local == 0 if name == "all" else x.local != 0
    count = total(x, wrong.sum(dims, keepdim=True), dims, name)
    answer = count == 0 if name == "all" else count != 0
    return reduced(x, answer.to(torch.uint8) if x.dtype == torch.uint8 else answer, dims, keepdim)


@register("reduction", "equal", "allclose")
def compare(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors agree everywhere."""
    test = torch.eq if name_of(func) == "equal" else torch.isclose
    if tuple(args[0].shape) != tuple(args[1].shape):
        return False
    return bool(test(*args, **kwargs).all())


@register("reduction", "softmax", "log_softmax", "logsumexp", "softmin", "_softmax")
def softmaxes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Softmax along any dim; along a cut dim, with the global maximum and sum."""
    name = name_of(func)
    given = dict(zip(("input", "dim"), args[:2], strict=False)) | kwargs
    x, dim, dtype = given["input"], given.get("dim"), given.get("dtype")
    if dim is None:
        raise UnsupportedOp(f"{name} of a sharded tensor needs a dim")
    dims = dims_of(dim, x.ndim, name)
    keep = bool(given.get("keepdim", args[2] if name == "logsumexp" and len(args) > 2 else name != "logsumexp"))
    if not x.placement.axes_of(dims):
        local = func(x.local, *args[1:], **{k: v for k, v in kwargs.items() if k not in ("input", "self")})
        return (
            ShardedTensor(local, x.placement)
            if name != "logsumexp"
            else reduced(
                x,
                local
                if keep
                else local.unsqueeze(dims[0])
                if len(dims) == 1
                else torch.logsumexp(x.local, dims, keepdim=True),
                dims,
                keep,
            )
        )
    result = func(x.local.new_zeros((1,) * x.ndim), *args[1:], **kwargs).dtype
    logits = x.local.to(dtype or result) * (-1 if name == "softmin" else 1)
    best = extreme_of(ShardedTensor(logits.detach(), x.placement), dims, True, name)
    best = torch.where(best.isinf(), torch.zeros_like(best), best)
    shifted = logits - best
    weights = shifted.exp()
    norm = total(x, weights.sum(dims, keepdim=True), dims, name)
    if name == "logsumexp":
        return reduced(x, norm.log() + best, dims, keep)
    return ShardedTensor(shifted - norm.log() if name == "log_softmax" else weights / norm, x.placement)


ALONG = {
    "cumsum": 1, "cumprod": 1, "sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2, "median": 1, "mode": 1, "glu": 1,
    "logcumsumexp": 1, "cummax": 1, "cummin": 1, "prod": 1, "normalize": 2, "diff": 2,
    "cosine_similarity": 2, "quantile": 2,
}  # fmt: skip
DEFAULT_DIM = {"sort": -1, "argsort": -1, "topk": -1, "kthvalue": -1, "median": None, "mode": -1, "glu": -1,
               "normalize": 1, "diff": -1, "cosine_similarity": 1}  # fmt: skip


@register("along a dim", *ALONG)
def along(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation along one dim that is not cut, which each rank runs on its own pieces."""
    name = name_of(func)
    operands = [a for a in args if isinstance(a, Tensor) and a.ndim]
    x = args[0]
    if len(operands) > 1:
        layout = common_layout(func, operands)
        x = ShardedTensor(piece_of(x, layout, name).expand(layout.local_shape), layout)
        args = (x, *args[1:])
    place = ALONG[name]
    dim = kwargs.get("dim", args[place] if len(args) > place else DEFAULT_DIM.get(name))
    dims = dims_of(dim, x.ndim, name)
    if x.placement.axes_of(dims):
        raise UnsupportedOp(
            f"{name} along dims {dims} of a sharded tensor of shape {tuple(x.shape)}, where dims "
            f"{x.placement.cut_dims} are cut: call .full() first, or add a rule to src/mural/shard/ops/reduce.py"
        )
    local = [piece_of(a, x.placement, name) if isinstance(a, Tensor) and a.ndim else a for a in args]
    result = func(*local, **kwargs)

    def wrap(value: Tensor) -> Tensor:
        if value.ndim == x.ndim:
            return ShardedTensor(value, x.placement.uncut_resized(value.shape))
        keep = [d for d in range(x.ndim) if d not in dims]
        return ShardedTensor(value, x.placement.pick(keep, [x.shape[d] for d in keep]))

    return type(result)([wrap(v) for v in result]) if isinstance(result, tuple) else wrap(result)


@register("along a dim", "one_hot")
def one_hot(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Classes as a new last dim."""
    x, classes = bound(args, kwargs, ("tensor", "num_classes"), -1)
    count = int(torch.amax(x)) + 1 if classes == -1 else classes
    local = func(x.local, count) if x.local.numel() else x.local.new_zeros((*x.local.shape, count))
    return ShardedTensor(local, x.placement.pick([*range(x.ndim), None], (*x.shape, count)))


@register("along a dim", "channel_shuffle", "native_channel_shuffle")
def channel_shuffle(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Channels in another order."""
    if args[0].placement.cuts[1] is not None:
        raise UnsupportedOp("channel_shuffle along a channel dim that is cut")
    return ShardedTensor(func(args[0].local, *args[1:], **kwargs), args[0].placement)


@register("along a dim", "prelu")
def prelu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A slope for each channel, which are not cut."""
    x, weight = bound(args, kwargs, ("input", "weight"))
    if x.ndim > 1 and x.placement.cuts[1] is not None and weight.numel() > 1:
        raise UnsupportedOp("prelu with a slope for each channel, along a channel dim that is cut")
    return ShardedTensor(func(x.local, weight), x.placement)


@register("along a dim", "scatter_", "scatter", "gather", "scatter_add", "scatter_add_")
def scatter(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Picking or writing classes along a dim that is not cut; into a plain tensor, with the whole index."""
    names = {"gather": ("input", "dim", "index")}.get(name_of(func), ("input", "dim", "index", "src"))
    given = dict(zip(names, args, strict=False)) | kwargs
    x, dim = given["input"], given["dim"]
    if not isinstance(x, ShardedTensor):
        rest = [a.full() if isinstance(a, ShardedTensor) else a for a in args[1:]]
        return func(x, *rest, **{k: v.full() if isinstance(v, ShardedTensor) else v for k, v in kwargs.items()})
    index = given["index"]
    dim = dim_of(dim, x.ndim, name_of(func))
    same = isinstance(index, ShardedTensor) and index.placement.gathered((dim,)).cuts == x.placement.cuts
    if x.placement.cuts[dim] is not None or not same:
        raise UnsupportedOp(f"{name_of(func)} along a cut dim, or with an index in another layout")
    layout = index.placement
    values = {
        k: piece_of(v, layout, name_of(func)) if isinstance(v, Tensor) and v.ndim else v
        for k, v in given.items()
        if k != "input"
    }
    result = func(x.local, **values)
    return x if result is x.local else ShardedTensor(result, x.placement.uncut_resized(result.shape))
