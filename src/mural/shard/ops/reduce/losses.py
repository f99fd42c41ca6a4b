"""Losses: the loss of the whole batch and image, a plain number that is the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import LayoutError, UnsupportedOp
from mural.geometry import broadcast
from mural.shard.layout import Layout
from mural.shard.ops.pointwise.elementwise import common_layout, piece_of
from mural.shard.relayout import merged, pull
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor

POINTWISE = {
    "mse_loss": ("input", "target", "size_average", "reduce", "reduction", "weight"),
    "l1_loss": ("input", "target", "size_average", "reduce", "reduction", "weight"),
    "smooth_l1_loss": ("input", "target", "size_average", "reduce", "reduction", "beta"),
    "huber_loss": ("input", "target", "reduction", "delta", "weight"),
    "binary_cross_entropy": ("input", "target", "weight", "size_average", "reduce", "reduction"),
    "binary_cross_entropy_with_logits": (
        "input", "target", "weight", "size_average", "reduce", "reduction", "pos_weight"
    ),
    "kl_div": ("input", "target", "size_average", "reduce", "reduction", "log_target"),
    "poisson_nll_loss": ("input", "target", "log_input", "full", "size_average", "eps", "reduce", "reduction"),
    "soft_margin_loss": ("input", "target", "size_average", "reduce", "reduction"),
}  # fmt: skip
BY_WEIGHTS = ("mse_loss", "l1_loss")
"""Losses whose mean with weights is divided by their sum; others divide by the number of positions."""
CLASS_LOSSES = ("cross_entropy", "nll_loss", "nll_loss2d", "nll_loss_nd")
REDUCTIONS = ("none", "mean", "sum")


def reduction_of(given: dict[str, Any], name: str) -> str:
    """The requested reduction, old spellings included."""
    average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    if average is not None or reduce is not None:
        return "none" if reduce is False else "sum" if average is False else "mean"
    reduction = given.pop("reduction", "mean")
    if reduction not in REDUCTIONS and not (name == "kl_div" and reduction == "batchmean"):
        raise ValueError(f"{name}: reduction {reduction!r} is not one of {REDUCTIONS}")
    return reduction


def check_tensors(name: str, scores: object, target: object) -> None:
    """Raise unless a loss gets tensors: a model may return a dict or a tuple, and a sample may lack its target."""
    if not isinstance(scores, Tensor):
        keys = f" with the keys {', '.join(map(repr, scores))}" if isinstance(scores, dict) else ""
        raise LayoutError(
            f"{name} takes a tensor, but the model returned a {type(scores).__name__}{keys}: return the tensor alone, "
            f"or write a loss that takes all of it and picks what it needs"
        )
    if not isinstance(target, Tensor):
        raise LayoutError(f"{name} compares with a target, but got {target!r}: give masks or labels")


def check_pair(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise unless the target of one of torch's losses fits the scores; a loss that broadcasts takes any."""
    given: dict[str, Any] = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
    scores, target = given.get("input"), given.get("target")
    check_tensors(name, scores, target)
    if isinstance(scores, Tensor) and isinstance(target, Tensor):
        shape, found = tuple(scores.shape), tuple(target.shape)
        by_class = name in CLASS_LOSSES and len(shape) > 1
        needed = shape[:1] + shape[2:] if by_class and not target.is_floating_point() else shape
        if found != needed and (by_class or name.startswith("binary")):
            raise unlike(name, found, needed)


def unlike(name: str, found: Sequence[int], needed: Sequence[int]) -> LayoutError:
    """The error for a target whose shape is not the one that the scores need."""
    if len(found) == 1 < len(needed):
        fix = "these are labels of whole images: give masks, or a model with one score for each class"
    elif len(needed) == 1 < len(found):
        fix = "these are masks: give labels of whole images, or a model with scores for every position"
    else:
        fix = "let the model return scores at the size of the target, as by F.interpolate"
    return LayoutError(f"{name}: target has shape {tuple(found)}, the scores need {tuple(needed)}: {fix}")


def cutting_axes(layout: Layout) -> tuple[str, ...]:
    """All mesh axes that cut something."""
    return layout.axes_of(range(layout.ndim))


@register("loss", *POINTWISE)
def pointwise_loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A pointwise loss, averaged over the global number of positions."""
    name = name_of(func)
    given = dict(zip(POINTWISE[name], args, strict=False)) | kwargs
    reduction = reduction_of(given, name)
    given.pop("reduction", None)
    operands = {k: v for k, v in given.items() if isinstance(v, Tensor)}
    values = (given["input"], given["target"])
    check_pair(name, values, {})
    layout = common_layout(func, list(operands.values()))
    pieces = {k: piece_of(v, layout, name) for k, v in operands.items()}
    shared = broadcast(pieces["input"].shape, pieces["target"].shape)
    given |= pieces | {k: pieces[k].expand(shared) for k in ("input", "target")}
    if reduction == "none":
        return ShardedTensor(func(**given, reduction="none"), layout)
    weighted_mean = "weight" in pieces and name in BY_WEIGHTS and reduction == "mean"
    total = merged(func(**given, reduction="sum"), layout.mesh, cutting_axes(layout), name)
    if reduction == "sum":
        return total
    if weighted_mean:
        weights = merged(pieces["weight"].expand(shared).sum(), layout.mesh, cutting_axes(layout), name)
        return total / weights
    return total / (layout.shape[0] if reduction == "batchmean" else prod(broadcast(*(tuple(v.shape) for v in values))))


def without_classes(layout: Layout) -> Layout:
    """The layout of a target without the class dim."""
    keep = [0, *range(2, layout.ndim)] if layout.ndim > 1 else []
    return layout.pick(keep, [layout.shape[d] for d in keep])


def target_piece(target: Tensor, layout: Layout, name: str) -> Tensor:
    """The part of a target that belongs to this rank's piece of the scores."""
    if tuple(target.shape) != layout.shape:
        raise unlike(name, target.shape, layout.shape)
    if isinstance(target, ShardedTensor):
        return pull(target, layout.wants(), name)
    return piece_of(target, layout, name)


@register("loss", *CLASS_LOSSES)
def class_loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Cross-entropy and negative log-likelihood, with global denominators."""
    name = "cross_entropy" if name_of(func) == "cross_entropy" else "nll_loss"
    names = (
        "input",
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    reduction = reduction_of(given, name)
    given.pop("reduction", None)
    scores, target, weight = given.pop("input"), given.pop("target"), given.pop("weight", None)
    check_tensors(name, scores, target)
    if isinstance(weight, ShardedTensor) and not weight.placement.cut_dims:
        weight = weight.local.detach()  # torch takes none with a gradient, but totals of tiles are tried with one
    ignore = given.get("ignore_index", -100)
    if not isinstance(scores, ShardedTensor):
        if not isinstance(target, ShardedTensor):
            raise UnsupportedOp(f"{name} with a sharded weight")
        return func(scores, target.full(), weight, reduction=reduction, **given)
    layout = scores.placement
    if layout.ndim < 2 or layout.is_cut(1):
        raise UnsupportedOp(f"{name}: scores of shape {layout.shape} need a class dim 1 that is not cut")
    soft = target.is_floating_point()
    place = layout if soft else without_classes(layout)
    wanted = target_piece(target, place, name)
    loss = F.cross_entropy if name == "cross_entropy" else F.nll_loss
    if reduction == "none":
        return ShardedTensor(loss(scores.local, wanted, weight, reduction="none", **given), without_classes(layout))
    axes, mesh = cutting_axes(layout), layout.mesh
    if wanted.numel() and scores.local.is_cuda:
        # Added up in a second call: on a GPU, that of torch adds in any order, and gives other bits each time.
        local = loss(scores.local, wanted, weight, reduction="none", **given).sum()
    elif wanted.numel():
        local = loss(scores.local, wanted, weight, reduction="sum", **given)
    else:
        local = empty_loss(scores.local, wanted, lambda a, b: loss(a, b, weight, reduction="sum", **given))
    if reduction == "sum" or soft:
        total = merged(local, mesh, axes, name)
        return total if reduction == "sum" else total / (prod(layout.shape) // layout.shape[1])
    valid = wanted != ignore
    counted = valid.to(local.dtype) if weight is None else weight[wanted.where(valid, 0)].to(local.dtype) * valid
    if mesh.tiled:  # apart, as only one of them has a gradient
        total, count = merged(local, mesh, axes, name), merged(counted.sum(), mesh, axes, name)
        # Where nothing counts, torch's loss is not a number and its gradient is 0.
        return torch.where(count != 0, total / torch.where(count != 0, count, 1), float("nan"))
    total, count = merged(torch.stack([local, counted.sum()]), mesh, axes, name).unbind()  # one message for both
    return total / count


def empty_loss(scores: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The zero of a rank without positions: with the type of its peers' losses, connected to scores and target."""
    one = torch.zeros(1, scores.shape[1], dtype=scores.dtype, device=scores.device) + 0 * scores.sum()
    wanted = torch.zeros(1, dtype=target.dtype, device=target.device)
    if target.is_floating_point():
        wanted = one.detach() + 0 * target.sum()
    return 0 * loss(one, wanted)


def dice_loss(
    scores: Tensor,
    target: Tensor,
    *,
    smooth: float = 1.0,
    ignore_index: int | None = None,
    background: bool = True,
) -> Tensor:
    """One minus the Dice overlap of softmax scores (N, C, …) and classes (N, …), averaged over images and classes.

    Works on plain and on sharded tensors: it is written in plain torch. `background=False` leaves class 0 out.

    >>> scores = torch.tensor([[[9.0, -9.0], [-9.0, 9.0]]])
    >>> float(dice_loss(scores, torch.tensor([[0, 1]]), smooth=0.0)) < 1e-6
    True
    """
    check_tensors("dice_loss", scores, target)
    if target.ndim != scores.ndim - 1:
        raise LayoutError(f"dice_loss needs classes of {scores.ndim - 1} dims, got {target.ndim}: give class numbers")
    probabilities = torch.softmax(scores, 1)
    classes = torch.arange(scores.shape[1], device=scores.device).view(1, -1, *(1,) * (scores.ndim - 2))
    truth = (target.unsqueeze(1) == classes).to(probabilities.dtype)
    if ignore_index is not None:
        valid = (target != ignore_index).unsqueeze(1).to(probabilities.dtype)
        probabilities, truth = probabilities * valid, truth * valid
    dims = tuple(range(2, scores.ndim))
    both = (probabilities * truth).sum(dims)
    either = probabilities.sum(dims) + truth.sum(dims)
    overlap = (2 * both + smooth) / (either + smooth)
    return 1 - (overlap if background else overlap[:, 1:]).mean()
