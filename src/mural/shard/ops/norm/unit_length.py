"""Vectors along any dims brought to one length, compared by their angle, or divided by their neighbours' energy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mural.errors import LayoutError, UnsupportedOp
from mural.shard.ops.call_arguments import bound, dims_of
from mural.shard.ops.pointwise.along_dim import along
from mural.shard.ops.pointwise.elementwise import common_layout
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor


@register("reduction", "normalize")
def normalize(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Vectors of length one."""
    x, p, dim, eps, out = bound(args, kwargs, ("input", "p", "dim", "eps", "out"), 2.0, 1, 1e-12, None)
    if out is not None:
        raise LayoutError("normalize(out=…) is not supported for sharded tensors: use its result")
    if not x.placement.axes_of(dims_of(dim, x.ndim, "normalize")):
        return along(func, (x, p, dim, eps), {})
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps)


@register("reduction", "cosine_similarity")
def cosine_similarity(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cosine of the angle between vectors; as in torch, a length below `eps` is raised without a gradient."""
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
    """The length, raised to `eps` in value alone: its gradient stays."""
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
    return ShardedTensor(func(x.local, *args[1:], **kwargs), x.placement)
