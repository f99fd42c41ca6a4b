"""Reshapes of sharded tensors, and settling: plain dims for tensors whose merged dims no rule serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import UnsupportedOp
from mural.shard.folds.regroup import folded_shape, regrouped
from mural.shard.gradient_guard import mirror_gradient
from mural.shard.relayout import moves_data, relayout
from mural.shard.table import RESHAPING, name_of, register_folded, writes
from mural.shard.tensor import ShardedTensor, unfolded


def settled(value: Any) -> Any:
    """A tensor with plain dims, gathered if the cuts of merged dims require it; any other value unchanged."""
    if not isinstance(value, ShardedTensor) or not value.folds:
        return value
    return reshaped(unfolded(value), tuple(value.shape), "reshape", fold=False)


def reshaped(x: ShardedTensor, shape: tuple[int, ...], name: str, *, fold: bool = True) -> ShardedTensor:
    """The tensor in another shape: dims whose cuts do not survive are cut elsewhere or gathered first."""
    x, aliased, partial = unfolded(x), x.aliased, x.partial
    plan = regrouped(x.placement, shape, fold)
    while plan.lost or plan.aligned:
        target = x.placement.gathered(plan.lost)
        for dim, cuts in plan.aligned.items():
            target = target.with_cut(dim, cuts, cuts.extent)
        aliased = name if moves_data(x, target) else aliased
        x = relayout(x, target, name)
        plan = regrouped(x.placement, shape, fold)
    layout = plan.layout(x.placement)
    local = x.local.reshape(layout.local_shape)
    if plan.fold and not viewable(x.local, folded_shape(layout.local_shape, plan.fold)):
        local = local.clone(memory_format=torch.contiguous_format)  # as torch does: writes must not reach the original
    elif (plan.fold and x.placement.thin) or partial:
        aliased = aliased or name  # such a piece cannot tell whether torch would copy
    return ShardedTensor(local, layout, aliased, plan.fold)


def viewable(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor can be viewed in another shape without a copy."""
    if tensor.is_contiguous():
        return True
    try:
        tensor.detach().view(shape)
    except RuntimeError:
        return False
    return True


def write_folded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A write to a tensor with merged dims that no rule serves: done on a settled copy, which is copied back."""
    target: ShardedTensor = args[0]
    if name_of(func) in RESHAPING or target.aliased:
        raise UnsupportedOp(
            f"{name_of(func)} writes in place to a reshape of a sharded tensor: use its result form, or a .clone()"
        )
    apart = settled(target)
    copy = ShardedTensor(apart.local.clone(), apart.placement)
    func(copy, *args[1:], **kwargs)
    back = reshaped(copy, target.placement.shape, "reshape", fold=False)
    target.local.copy_(relayout(back, target.placement, "reshape").local)
    if target.local.requires_grad:
        mirror_gradient(target)
    return target


@register_folded("")
def on_settled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result on tensors that were settled first."""
    if args and isinstance(args[0], ShardedTensor) and args[0].folds and writes(name_of(func)):
        return write_folded(func, args, kwargs)
    args, kwargs = pytree.tree_map(settled, (args, kwargs))
    return func(*args, **kwargs)
