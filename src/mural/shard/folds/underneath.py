"""Rules for tensors with merged dims: most operations run on the dims underneath, and merge their result again.

An operation without a rule here first settles the tensor into plain dims, which may gather them: exact, but it moves
data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from mural.shard.folds.regroup import Folds, spans
from mural.shard.folds.reshape import on_settled, reshaped, settled
from mural.shard.ops.pointwise.elementwise import INPLACE, NAMES, common_shape, written
from mural.shard.table import TABLE, register_folded
from mural.shard.tensor import ShardedTensor, unfolded


def rule_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The usual rule's result."""
    return TABLE[func][1](func, args, kwargs)


def folded(value: Any, folds: Folds) -> Any:
    """A result with its dims merged again; a plain one unchanged."""
    if not isinstance(value, ShardedTensor) or all(n == 1 for n in folds):
        return value
    return ShardedTensor(value.local, value.placement, value.aliased, folds)


def folds_of(x: Tensor) -> Folds:
    """How many dims each dim merges; one each if nothing is merged."""
    return (isinstance(x, ShardedTensor) and x.folds) or (1,) * x.ndim


def factors_of(x: Tensor) -> list[tuple[int, ...]]:
    """The extents that each dim merges."""
    shape = x.placement.shape if isinstance(x, ShardedTensor) else tuple(x.shape)
    return [tuple(shape[a:b]) for a, b in spans(folds_of(x))]


def common_factors(operands: Sequence[tuple[Tensor, Sequence[Any]]]) -> dict[Any, tuple[int, ...]]:
    """For each label of the operands' dims, the extents that it merges: those of the first operand that merges it."""
    found: dict[Any, tuple[int, ...]] = {}
    for x, labels in operands:
        for label, extents in zip(labels, factors_of(x), strict=True):
            now = found.setdefault(label, (1,))
            if prod(extents) != 1 and (prod(now) == 1 or (len(now) == 1 and len(extents) > 1)):
                found[label] = extents
    return found


def opened(x: Tensor, labels: Sequence[Any], factors: dict[Any, tuple[int, ...]]) -> Tensor:
    """An operand with every label's dims separate, with extent 1 where it is broadcast along them."""
    shape: list[int] = []
    for label, extent in zip(labels, x.shape, strict=True):
        shape += factors[label] if extent != 1 else [1] * len(factors[label])
    if isinstance(x, ShardedTensor):
        if x.placement.shape == tuple(shape):
            return unfolded(x)
        apart = x.folds and any(f != factors[k] for k, f in zip(labels, factors_of(x), strict=True) if len(f) > 1)
        return reshaped(settled(x) if apart else x, tuple(shape), "reshape", fold=False)
    return x.reshape(shape) if tuple(x.shape) != tuple(shape) else x


def aligned_labels(x: Tensor, ndim: int) -> range:
    """The dims that an operand's dims align with when it is broadcast to that many dims."""
    return range(ndim - x.ndim, ndim)


@register_folded(*NAMES)
def pointwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A pointwise operation on the dims underneath, with the dims of the other operands opened as well."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    target = args[0] if func in INPLACE or kwargs.get("inplace") else None
    if target is not None and not (isinstance(target, ShardedTensor) and target.folds):
        return on_settled(func, args, kwargs)
    ndim = max(x.ndim for x in operands)
    common_shape(func, operands)
    labelled = [(x, aligned_labels(x, ndim)) for x in ([target] if target is not None else []) + operands]
    factors = common_factors(labelled)
    if target is not None and [factors[k] for k in aligned_labels(target, ndim)] != factors_of(target):
        return on_settled(func, args, kwargs)
    open_leaves = [
        opened(x, aligned_labels(x, ndim), factors) if isinstance(x, Tensor) and x.ndim else x for x in leaves
    ]
    open_args, open_kwargs = pytree.tree_unflatten(open_leaves, spec)
    result = rule_of(func, open_args, open_kwargs)
    if target is not None:
        return written(target, target.local)
    folds = tuple(len(factors[k]) for k in range(ndim))
    return pytree.tree_map(lambda y: args[0] if y is open_args[0] else folded(y, folds), result)
