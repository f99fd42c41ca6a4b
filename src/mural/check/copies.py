"""Copies of a model and its loss that train apart from them: a loss that holds the model holds its copy then."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from logging import Logger
from types import CellType, FunctionType, MethodType
from typing import Any, cast

from torch import nn

from mural.engine import Loss
from mural.engine.loss_variables import globals_of, held_by, variables
from mural.engine.materialize import uncompiled
from mural.graph.kept_values import FIXED


def copied(model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss]:
    """A copy of a model, and of a loss with whatever it may change: what trains in it, counters, lists, buffers.

    >>> scale = nn.Linear(1, 1).weight
    >>> model, loss = copied(nn.Linear(1, 1), partial(dict, scale=scale))
    >>> loss()["scale"] is scale, bool(loss()["scale"] == scale)
    (False, True)
    """
    memo: dict[int, Any] = {}
    return deepcopy(model, memo), copy_of(loss, memo)


def copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what may change in a value, and of the containers and functions on the way to it.

    What cannot be copied stays as it is, as an open file does.
    """
    value = uncompiled(value)
    if not changeable(value, set()):
        return value
    if isinstance(value, partial):
        given = cast("partial[Any]", value)
        arguments = {name: copy_of(part, memo) for name, part in given.keywords.items()}
        return partial(copy_of(given.func, memo), *(copy_of(part, memo) for part in given.args), **arguments)
    if isinstance(value, FunctionType):
        return copy_of_function(value, memo)
    if type(value) in (list, tuple):
        parts: list[Any] = [copy_of(part, memo) for part in cast("list[Any]", value)]
        return parts if isinstance(value, list) else tuple(parts)
    if type(value) is dict:
        return {key: copy_of(part, memo) for key, part in cast("dict[Any, Any]", value).items()}
    try:
        if isinstance(value, MethodType):
            return MethodType(copy_of(value.__func__, memo), deepcopy(value.__self__, memo))
        return deepcopy(value, memo)
    except Exception:  # whatever a class of the user's, or of any package, says to a copy
        if held_by(value):
            raise
        return value


def changeable(value: Any, seen: set[int]) -> bool:
    """Whether a call may change something in a value: numbers, texts and the functions of libraries stay.

    >>> changeable(partial(print, end=""), set()), changeable(partial(print, []), set())
    (False, True)
    """
    if id(value) in seen or (isinstance(value, (*FIXED, Logger)) and not isinstance(value, (nn.Module, FunctionType))):
        return False
    seen.add(id(value))
    if isinstance(value, (FunctionType, MethodType, partial)):
        if isinstance(value, MethodType) and changeable(value.__self__, seen):
            return True
        return any(changeable(part, seen) for _, part in variables(value, whole=False))
    if isinstance(value, (tuple, frozenset)):
        return any(changeable(part, seen) for part in cast("tuple[Any, ...]", value))
    return True


def copy_of_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A function of the same code, with copies in its closure, its defaults and the globals that it reads."""
    known = memo.get(id(function))
    if known is not None:
        return known
    places = dict(function.__globals__)
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(function.__code__, places, function.__name__, None, cells if function.__closure__ else None)
    memo[id(function)] = made  # before its parts, among which it may be
    for name in globals_of(function.__code__):
        if name in places:
            places[name] = copy_of(places[name], memo)
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents = copy_of(old.cell_contents, memo)
        except ValueError:  # not assigned yet
            continue
    made.__defaults__ = cast("tuple[Any, ...] | None", copy_of(function.__defaults__, memo))
    made.__kwdefaults__ = copy_of(function.__kwdefaults__, memo)
    return made
