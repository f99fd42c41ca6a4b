"""What a configuration names: a model, an optimizer, a schedule. The user names them; no file runs code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from mural.engine.alignment import graph_for
from mural.errors import ConfigError, MuralError
from mural.train.config import ModelConfig, OptimizerConfig, ScheduleConfig
from mural.train.named_callables import called, named

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


def result_shape(model: nn.Module, image: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a model's result for an image (C, H, W), without the batch; None where that is not one tensor.

    It is not known of a model that cannot be captured.
    """
    try:
        shapes = [value.shape for value in graph_for(model, image).outputs]
    except (MuralError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError):
        return None
    return shapes[0][1:] if len(shapes) == 1 and shapes[0] else None


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
