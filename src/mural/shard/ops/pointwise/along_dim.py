"""Operations along a dim that is not cut: each rank runs them on its own pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.halo.fuse import mapped
from mural.shard.ops.call_arguments import bound, dims_of
from mural.shard.ops.pointwise.elementwise import common_layout, piece_of
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor

ALONG = {
    "cumsum": 1, "cumprod": 1, "sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2, "median": 1, "mode": 1, "glu": 1,
    "logcumsumexp": 1, "cummax": 1, "cummin": 1, "prod": 1, "normalize": 2, "diff": 2,
    "cosine_similarity": 2, "quantile": 2,
}  # fmt: skip
"""The position of each operation's dim among its arguments."""
EXACT = (
    "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "prod", "diff", "sort", "argsort", "topk", "kthvalue",
    "median", "mode", "quantile", "normalize", "cosine_similarity",
)  # fmt: skip
"""Operations that other files make exact along a cut dim too."""

DEFAULT_DIM = {"sort": -1, "argsort": -1, "topk": -1, "kthvalue": -1, "median": None, "mode": -1, "glu": -1,
               "normalize": 1, "diff": -1, "cosine_similarity": 1}  # fmt: skip


@register("along a dim", *(name for name in ALONG if name not in EXACT))
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
            f"{x.placement.cut_dims} are cut: call .full() first, or add a rule to "
            f"src/mural/shard/ops/pointwise/along_dim.py"
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
    if args[0].placement.is_cut(1):
        raise UnsupportedOp("channel_shuffle along a channel dim that is cut")
    return ShardedTensor(func(args[0].local, *args[1:], **kwargs), args[0].placement)


@register("along a dim", "prelu")
def prelu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A slope for each channel; channels must not be cut."""
    x, weight = bound(args, kwargs, ("input", "weight"))
    if x.ndim > 1 and x.placement.is_cut(1) and weight.numel() > 1:
        raise UnsupportedOp("prelu with a slope for each channel, along a channel dim that is cut")
    return mapped(x, lambda piece: func(piece, weight))
