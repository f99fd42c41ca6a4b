"""What a configuration names: a model, a loss, an optimizer, a schedule. The user names them; no file runs code."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from mural.data.loading.label_range import LabelRange
from mural.engine.alignment import graph_for
from mural.errors import ConfigError, MuralError
from mural.shard import dice_loss
from mural.train.config import LossConfig, ModelConfig, OptimizerConfig, ScheduleConfig
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
UNFIT = {
    "LBFGS": "it computes the loss several times within an update",
    "SparseAdam": "it takes sparse gradients alone, and those of images are dense",
}
"""Optimizers of torch.optim that cannot train here, and why."""


def make_model(config: ModelConfig, seed: int) -> nn.Module:
    """The model, with the weights that the seed gives."""
    torch.manual_seed(seed)
    model = called(named(config.factory, "model.factory"), config.arguments, "model.arguments")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f'model.factory = "{config.factory}" gave a {type(model).__name__}, not an nn.Module: return one'
        )
    return model.to(getattr(torch, config.dtype))


def make_meta_model(config: ModelConfig) -> nn.Module:
    """The model without memory for its weights, or with it if its making needs their values."""
    try:
        with torch.device("meta"):
            return make_model(config, seed=0)
    except (NotImplementedError, RuntimeError):
        return make_model(config, seed=0)


def load_weights(path: Path, model: nn.Module) -> None:
    """Give the model the weights of a safetensors file, which has to hold all of them and nothing else."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.weights = {str(path)!r} cannot be read as safetensors: {error}") from error
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        other = difference(found, model.state_dict())
        raise ConfigError(f"model.weights = {str(path)!r} are those of another model: {other or error}") from error


def difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """In what the weights of a file differ from those of a model, with one example of each kind.

    >>> difference({"a": torch.ones(2), "c": torch.ones(1)}, {"a": torch.ones(3), "b": torch.ones(1)})
    "1 are missing (as 'b'); 1 are unknown (as 'c'); 1 have another shape ('a': (2,) there, (3,) here)"
    """
    missing, unknown = [name for name in wanted if name not in found], [name for name in found if name not in wanted]
    both = ((name, tuple(found[name].shape), tuple(wanted[name].shape)) for name in found if name in wanted)
    other = [(name, there, here) for name, there, here in both if there != here]
    words = [f"{len(missing)} are missing (as {missing[0]!r})"] if missing else []
    words += [f"{len(unknown)} are unknown (as {unknown[0]!r})"] if unknown else []
    for name, there, here in other[:1]:
        words.append(f"{len(other)} have another shape ({name!r}: {there} there, {here} here)")
    checkpoint = [name for name in unknown if name.removeprefix("model.") in missing]
    return "; ".join(words) + (". A run's weights are written by `mural export RUN FILE`" if checkpoint else "")


def make_loss(config: LossConfig, device: torch.device, dtype: torch.dtype) -> Callable[[Any, Any], Tensor]:
    """The loss, with lists of numbers among its arguments as tensors."""

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
    if inspect.isclass(function):
        raise ConfigError(
            f'loss.name = "{config.name}" names a class: name a function of output and target, as '
            f'"torch.nn.functional:cross_entropy", or a variable that holds an instance'
        )
    check_arguments(function, config.arguments, "loss.arguments", given=2)
    return partial(function, **{key: value(key, given) for key, given in config.arguments.items()})


def check_loss(config: LossConfig, loss: Any, labels: LabelRange | None, dtype: torch.dtype) -> None:
    """Raise where a loss of mural's list does not take its arguments: it is tried on two positions.

    Lists among the arguments of a loss without classes may be of any shape, and are not tried.
    """
    classes = labels.classes if labels is not None else None
    lists = [value for value in loss.keywords.values() if isinstance(value, Tensor)]
    if config.name not in LOSSES or not config.arguments or (not classes and (lists or config.name in BY_CLASS)):
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


def has_known_results(loss: Callable[..., Any]) -> bool:
    """Whether it is known what a loss takes: that of torch, or of mural's list."""
    function = loss.func if isinstance(loss, partial) else loss
    return function in (*LOSSES.values(), F.nll_loss, F.binary_cross_entropy)


def result_shape(model: nn.Module, image: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a model's result for an image (C, H, W), without the batch; None where that is not one tensor.

    It is not known of a model that cannot be captured.
    """
    try:
        shapes = [value.shape for value in graph_for(model, image).outputs]
    except (MuralError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError):
        return None
    return shapes[0][1:] if len(shapes) == 1 and shapes[0] else None


def label_range(loss: Callable[..., Any], result: Sequence[int] | None) -> LabelRange | None:
    """The labels that a loss takes of results of a shape (K, …); None where that is not known.

    A loss of the user's own may take any.
    """
    function = loss.func if isinstance(loss, partial) else loss
    if function in (F.binary_cross_entropy_with_logits, F.binary_cross_entropy):
        return LabelRange()
    if function not in (F.cross_entropy, F.nll_loss, dice_loss) or not result:
        return None
    return LabelRange(result[0], ignored_label(loss))


def ignored_label(loss: Callable[..., Any]) -> int | None:
    """The label that a loss does not count, None where it counts all.

    A loss of the user's own is taken at its word, if its arguments have an `ignore_index`.
    """
    function, arguments = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    return arguments.get("ignore_index", -100 if function in (F.cross_entropy, F.nll_loss) else None)


def padding_label(loss: Callable[..., Any], labels: LabelRange | None) -> int | None:
    """The label with which masks are padded, that neither loss nor scores count; None where there is none.

    >>> padding_label(partial(F.cross_entropy, ignore_index=9), LabelRange(3, 9)), padding_label(F.mse_loss, None)
    (9, None)
    """
    ignored = ignored_label(loss)
    classes = 0 if labels is None else labels.classes or 0
    return None if ignored is None or 0 <= ignored < classes else ignored


def make_optimizer(config: OptimizerConfig, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of torch.optim of that name, upper or lower case."""
    known = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = known.get(config.name.lower())
    if kind is not None and kind.__name__ in UNFIT:
        raise ConfigError(f'optimizer.name = "{config.name}": {UNFIT[kind.__name__]}: choose another, as "AdamW"')
    if kind is None:
        near = get_close_matches(config.name.lower(), known, n=1)
        hint = f": did you mean {known[near[0]].__name__!r}?" if near else ': choose one, as "AdamW"'
        raise ConfigError(f'optimizer.name = "{config.name}" is not an optimizer of torch.optim{hint}')
    arguments: dict[str, Any] = {"lr": config.lr, **config.arguments, "params": list(parameters)}
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name} = {value!r}" for name, value in arguments.items() if name != "params")
        raise ConfigError(f"optimizer.arguments: {kind.__name__} does not take {given}: {error}") from error


def rate(config: ScheduleConfig, total: int, update: int) -> float:
    """What the learning rate is multiplied by at an update, of `total`.

    >>> [round(rate(ScheduleConfig("cosine", warmup=2), 10, u), 3) for u in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if update < config.warmup:
        return (update + 1) / config.warmup
    done = min(1.0, (update - config.warmup) / max(1, total - config.warmup))
    fall = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "polynomial": (1 - done) ** config.power,
        "step": config.factor ** ((update - config.warmup) // config.period),
    }[config.name]
    falls = config.name in ("linear", "cosine", "polynomial")
    return config.final + (1 - config.final) * fall if falls else fall


def make_schedule(config: ScheduleConfig, optimizer: torch.optim.Optimizer, total: int) -> LambdaLR:
    """The schedule over that many updates."""
    return LambdaLR(optimizer, partial(rate, config, total))
