"""What is asked of the planner, checked before anything is rehearsed."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import isclass
from math import isfinite
from numbers import Integral
from typing import Any

from torch import nn

from mural.engine.parallel import Parallel
from mural.errors import PlanError
from mural.plans import memory_for


def check_model(model: Any) -> None:
    """Raise unless it is a module of which something is trained."""
    if isinstance(model, Parallel):
        raise PlanError("the model is one that mural.parallelize made: give the module that it was made of")
    if isclass(model) and issubclass(model, nn.Module):
        raise PlanError(f"the model is the class {model.__name__}: give a module, as {model.__name__}(…)")
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model is a {type(model).__name__}: give a torch.nn.Module, which may wrap a function")
    parameters = list(model.parameters())
    if not parameters:
        raise PlanError(f"{type(model).__name__} has no parameters: there is no step of training to plan")
    if not any(p.requires_grad for p in parameters):
        raise PlanError(
            f"all {len(parameters)} parameters of {type(model).__name__} are frozen, so that no step has a backward: "
            f"call requires_grad_(True) on what is trained"
        )


def check_memory(memory: Any) -> None:
    """Raise unless it is a text; what it says is checked where it is read."""
    if memory is not None and not isinstance(memory, str):
        example = memory_for(memory) if isinstance(memory, int) and 0 < memory < 2**60 else "16GiB"
        raise PlanError(f'memory = {memory!r}: write a text with its unit, as memory="{example}"')


def check_shape(name: str, shape: Any, example: str) -> None:
    """Raise unless it is a shape of whole numbers from 1 on; an image has channels at least."""
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not all(is_size(n) for n in shape):
        raise PlanError(f"{name} = {shape!r}: give a shape of whole numbers of at least 1, {example}")
    if name == "image" and not shape:
        raise PlanError(f"image = {shape!r}: give the shape of one image, channels first, {example}")


def check_numbers(batch: Any, optimizer: Any) -> None:
    """Raise unless there are images, and numbers that an optimizer can keep."""
    if not is_size(batch):
        raise PlanError(f"batch = {batch!r}: give a whole number of images, at least 1")
    if type(optimizer) not in (int, float) or not isfinite(optimizer) or optimizer < 0:
        raise PlanError(
            f"optimizer = {optimizer!r}: give how many numbers it keeps for each of a parameter's: 2 for Adam, 1 for "
            f"SGD with momentum, 0 for plain SGD"
        )


def is_size(value: Any) -> bool:
    """Whether it is a whole number from 1 on."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= 1
