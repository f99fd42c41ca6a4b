"""The loss that a configuration names, and what is known of it: which labels it takes, and what padding is for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.data.loading.label_range import LabelRange
from mural.errors import ConfigError
from mural.shard import dice_loss
from mural.train.config import Config, LossConfig
from mural.train.named_callables import called, check_arguments, named
from mural.train.result_forms import BY_CLASS
from mural.typed import literal

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "bce": F.binary_cross_entropy_with_logits,
    "dice": dice_loss,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
}
CLASS_LOSSES = (F.cross_entropy, F.nll_loss, dice_loss, nn.CrossEntropyLoss, nn.NLLLoss)
BINARY_LOSSES = (F.binary_cross_entropy_with_logits, F.binary_cross_entropy, nn.BCEWithLogitsLoss, nn.BCELoss)
PADDED = -100
"""The label of a padded position, which no mask has unless it is ignored."""
Loss = Callable[..., Any]


def make_loss(config: LossConfig, device: torch.device, dtype: torch.dtype, padded: bool = False) -> Loss:
    """The loss, with lists of numbers among its arguments as tensors; `padded` targets mark positions without a value.

    Of a class, it is an instance.
    """

    def value(key: str, given: Any) -> Any:
        try:
            return torch.tensor(given, device=device, dtype=dtype) if isinstance(given, (list, tuple)) else given
        except (TypeError, ValueError) as error:
            raise ConfigError(f"loss.arguments: {key} = {given!r} should be a list of numbers ({error})") from error

    if config.name not in LOSSES and ":" not in config.name:
        near = get_close_matches(config.name, LOSSES, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f'loss.name = "{config.name}" is not one of {", ".join(LOSSES)}, nor an import path{hint}')
    function = LOSSES.get(config.name) or named(config.name, "loss.name")
    arguments = {key: value(key, given) for key, given in config.arguments.items()}
    if inspect.isclass(function):
        return made(config, function, arguments, device)
    check_arguments(function, config.arguments, "loss.arguments", given=2)
    if config.name in LOSSES and padded:
        return counted(config, function, arguments)
    return (
        takes_channel(function) if not arguments and isinstance(function, nn.Module) else partial(function, **arguments)
    )


def made(config: LossConfig, kind: type[Any], arguments: Mapping[str, Any], device: torch.device) -> Loss:
    """An instance of a class of losses."""
    if "__call__" not in dir(kind):
        raise ConfigError(
            f'loss.name = "{config.name}" names a class whose instances cannot be called: name a loss, as '
            f'"torch.nn:BCEWithLogitsLoss", or a function of output and target'
        )
    found = called(kind, arguments, "loss.arguments")
    return takes_channel(found.to(device)) if isinstance(found, nn.Module) else found


# -- targets with a channel --------------------------------------------------------------------------------------------


def one_hot(loss: Loss) -> bool:
    """Whether a loss makes channels of classes itself, as MONAI's do; they take a target (N, 1, …)."""
    return isinstance(loss, nn.Module) and any(getattr(part, "to_onehot_y", False) is True for part in loss.modules())


def takes_channel(loss: nn.Module) -> Loss:
    """A module as a loss of classes (N, …), if it takes them as (N, 1, …)."""
    return partial(with_channel, loss) if one_hot(loss) else loss


def with_channel(loss: Loss, output: Any, target: Any) -> Any:
    """A loss whose target gets a dim for one channel, if it has none."""
    apart = isinstance(output, Tensor) and isinstance(target, Tensor) and target.ndim == output.ndim - 1
    return loss(output, target.unsqueeze(1) if apart else target)


# -- padding -----------------------------------------------------------------------------------------------------------


def counted(config: LossConfig, function: Loss, arguments: Mapping[str, Any]) -> Loss:
    """A loss of mural's list over the positions that are not padded."""
    if config.name == "dice":
        return partial(over_classes, function, **{"ignore_index": PADDED, **arguments})
    unfit = [key for key in arguments if key in ("size_average", "reduce") or (key == "weight" and "l1" in config.name)]
    unfit += ["weight"] if config.name == "mse" and "weight" in arguments else []
    if unfit:
        raise ConfigError(
            f"loss.arguments: {unfit[0]} does not go with data.multiple above 1: leave one of them out, or take images "
            f"whose extents are multiples"
        )
    return partial(over_classes if config.name == "cross_entropy" else over_values, function, **arguments)


def over_classes(function: Loss, output: Tensor, target: Tensor, *, ignore_index: int = PADDED, **more: Any) -> Tensor:
    """A loss of classes: padded positions are ignored. Targets that are probabilities are values."""
    if target.is_floating_point():
        return over_values(function, output, target, **more)
    return function(output, target.masked_fill(target == PADDED, ignore_index), ignore_index=ignore_index, **more)


def over_values(function: Loss, output: Tensor, target: Tensor, *, reduction: str = "mean", **more: Any) -> Tensor:
    """A loss of each value over those that the target has: it is NaN where there is none.

    >>> target = torch.tensor([[1.0, 3.0, nan]])
    >>> float(over_values(F.mse_loss, torch.zeros(1, 3), target))
    5.0
    """
    if not target.is_floating_point():
        return function(output, target, reduction=reduction, **more)
    missing = torch.isnan(target)
    each = function(output, target.masked_fill(missing, 0.0), reduction="none", **more)
    if each.ndim < target.ndim:  # of all classes at once
        missing = missing.any(1)
    values = each.masked_fill(missing, 0.0)
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.sum() / (~missing).sum()


def padding_of(config: Config, loss: Loss, labels: LabelRange | None) -> float | None:
    """What masks are padded with, that neither loss nor scores count; None where the loss would count it.

    >>> padding_of(Config(), partial(F.cross_entropy, ignore_index=9), LabelRange(3, 9))
    9
    """
    if isinstance(loss, partial) and loss.func in (over_classes, over_values):
        return PADDED if config.data.mask == "classes" else nan
    ignored = ignored_label(loss)
    classes = 0 if labels is None else labels.classes or 0
    fits = config.data.mask == "classes" and ignored is not None and not 0 <= ignored < classes
    return ignored if fits else None


# -- what is known -----------------------------------------------------------------------------------------------------


def inner_loss(loss: Loss) -> Any:
    """The function or module that a loss is made of."""
    while isinstance(loss, partial):
        loss = loss.args[0] if loss.func in (over_classes, over_values, with_channel) else loss.func
    return loss


def is_one_of(loss: Loss, known: tuple[Any, ...]) -> bool:
    """Whether a loss is one of some functions, or an instance of one of some classes."""
    inner = inner_loss(loss)
    return any(isinstance(inner, one) if inspect.isclass(one) else inner is one for one in known)


def takes_classes(loss: Loss) -> bool:
    """Whether a loss is known to take classes."""
    return is_one_of(loss, CLASS_LOSSES) or one_hot(inner_loss(loss))


def has_known_results(loss: Loss) -> bool:
    """Whether it is known what a loss takes: that of torch, of MONAI, or of mural's list."""
    return is_one_of(loss, (*LOSSES.values(), *CLASS_LOSSES, *BINARY_LOSSES)) or one_hot(inner_loss(loss))


def label_range(loss: Loss, result: tuple[int, ...] | None) -> LabelRange | None:
    """The labels that a loss takes of results of a shape (K, …); None where that is not known.

    A loss of the user's own may take any.
    """
    if is_one_of(loss, BINARY_LOSSES):
        return LabelRange()
    if not takes_classes(loss) or not result:
        return None
    return LabelRange(result[0], ignored_label(loss))


def ignored_label(loss: Loss) -> int | None:
    """The label that a loss does not count, None where it counts all.

    A loss of the user's own is taken at its word, if its arguments, or it, have an `ignore_index`.
    """
    inner = inner_loss(loss)
    arguments = loss.keywords if isinstance(loss, partial) else {}
    usual = -100 if inner in (F.cross_entropy, F.nll_loss) else getattr(inner, "ignore_index", None)
    found = arguments.get("ignore_index", usual)
    return None if inner is dice_loss and found == PADDED else found


def check_loss(config: LossConfig, loss: Any, labels: LabelRange | None, dtype: torch.dtype) -> None:
    """Raise where a loss of mural's list does not take its arguments: it is tried on two positions.

    Lists among the arguments of a loss without classes may be of any shape, and are not tried.
    """
    classes = labels.classes if labels is not None else None
    if config.name not in LOSSES or not config.arguments:
        return
    lists = [value for value in loss.keywords.values() if isinstance(value, Tensor)]
    if not classes and (lists or config.name in BY_CLASS):
        return
    device = lists[0].device if lists else torch.device("cpu")
    scores = torch.zeros(1, classes or 1, 2, device=device, dtype=dtype)
    try:
        found = loss(scores, torch.zeros(1, 2, dtype=torch.long, device=device) if classes else scores)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        apart = f" of a model that tells {classes} classes apart" if classes else ""
        raise ConfigError(
            f"loss.arguments = {literal(config.arguments)}: {config.name}{apart} does not take these: {error}"
        ) from error
    if found.ndim:
        raise ConfigError(
            f'loss.arguments = {literal(config.arguments)}: the loss is not one number: set reduction = "mean"'
        )


def check_targets_of(config: Config, loss: Loss) -> None:
    """Raise where masks hold classes, and a loss of MONAI's would take them for channels."""
    inner = inner_loss(loss)
    could = isinstance(inner, nn.Module) and any(hasattr(part, "to_onehot_y") for part in inner.modules())
    if could and not one_hot(inner) and config.data.mask == "classes" and config.data.masks is not None:
        raise ConfigError(
            f'loss.name = "{config.loss.name}" compares channels, but masks hold classes: set loss.arguments = '
            f'{{ to_onehot_y = true, softmax = true }}, or data.mask = "channels" where masks have a channel for each'
        )
