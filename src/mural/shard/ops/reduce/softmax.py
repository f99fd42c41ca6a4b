"""Softmax over dims, cut or not: with the global maximum and sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.ops.call_arguments import dims_of
from mural.shard.ops.reduce.extremes import extreme_of
from mural.shard.ops.reduce.sums import reduced, total
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


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
    # Of a softmax, torch makes NaN where a value is infinite; of logsumexp, infinity.
    unusual = best.isinf() if name == "logsumexp" else best.isneginf()
    best = torch.where(unusual, torch.zeros_like(best), best)
    shifted = logits - best
    weights = shifted.exp()
    norm = total(x, weights.sum(dims, keepdim=True), dims, name)
    if name == "logsumexp":
        return reduced(x, norm.log() + best, dims, keep)
    return ShardedTensor(shifted - norm.log() if name == "log_softmax" else weights / norm, x.placement)
