"""Losses of tensors with merged dims: positions in one list, as in `y.movedim(1, -1).reshape(-1, classes)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mural.shard.folds.reshape import on_settled
from mural.shard.folds.underneath import aligned_labels, common_factors, folded, opened, rule_of
from mural.shard.ops.reduce.losses import CLASS_LOSSES, POINTWISE, check_pair
from mural.shard.table import name_of, register_folded


@register_folded(*CLASS_LOSSES)
def class_loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A loss over classes, on the dims underneath: those that are merged before the class dim come after it."""
    given = dict(zip(("input", "target"), args, strict=False)) | kwargs
    scores, target = given.pop("input"), given.pop("target")
    check_pair(name_of(func), (scores, target), {})
    of_scores: list[Any] = list(range(scores.ndim))
    of_target = of_scores if target.is_floating_point() else [d for d in of_scores if d != 1]
    factors = common_factors([(scores, of_scores), (target, of_target)])
    if scores.ndim < 2 or len(factors[1]) > 1:
        return on_settled(func, args, kwargs)
    first = len(factors[0])
    x, t = opened(scores, of_scores, factors), opened(target, of_target, factors)
    x = x.movedim(first, 1)
    if name_of(func) != "cross_entropy" and first > 1:
        x = x.contiguous()  # torch's backward takes no other
    pair = [x, t.movedim(first, 1) if target.is_floating_point() else t]
    result = rule_of(func, (*pair, *args[2:]), {k: v for k, v in kwargs.items() if k in given})
    return folded(result, tuple(len(factors[d]) for d in of_scores if d != 1))


@register_folded(*POINTWISE)
def pointwise_loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A loss of each position, on the dims underneath."""
    names = POINTWISE[name_of(func)]
    given = dict(zip(names, args, strict=False)) | kwargs
    check_pair(name_of(func), (given["input"], given["target"]), {})
    if given.get("reduction") == "batchmean":
        return pointwise_loss(func, (), given | {"reduction": "sum"}) / given["input"].shape[0]
    tensors = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.ndim}
    ndim = max(x.ndim for x in tensors.values())
    factors = common_factors([(x, aligned_labels(x, ndim)) for x in tensors.values()])
    apart = {k: opened(x, aligned_labels(x, ndim), factors) for k, x in tensors.items()}
    return folded(rule_of(func, (), given | apart), tuple(len(factors[d]) for d in range(ndim)))
