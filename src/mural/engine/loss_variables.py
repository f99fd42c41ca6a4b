"""The variables of a loss: what a function, a method, a `partial` or an object refers to when it is called.

def criterion(output, target, scale=SCALE):        scale     a default
    return net(output).mean() * t + DECAY           net, t    of the closure
                                                    DECAY     a global
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import Tensor, nn

from mural.engine.materialize import uncompiled

Path = tuple[str, ...]
LIBRARIES = ("torch", "mural")
"""Packages whose functions refer to nothing that is trained."""


def held_by(value: Any) -> list[tuple[Path, nn.Module | Tensor]]:
    """The modules that a loss refers to, and its leaf tensors that require gradients, each with its variables' names.

    The path is empty for the loss itself, and for the module whose method it is.

    >>> scale = nn.Linear(1, 1).weight
    >>> [path for path, _ in held_by(partial(dict, scale=scale))]
    [('scale',)]
    """
    return list(_held(value, (), set()))


def _held(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, nn.Module | Tensor]]:
    value = uncompiled(value)
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield path, value
    elif isinstance(value, Tensor):
        if value.is_leaf and value.requires_grad:
            yield path, value
    else:
        for name, part in variables(value, whole=not path):
            yield from _held(part, (*path, name) if name else path, seen)


def variables(value: Any, whole: bool) -> Iterable[tuple[str, Any]]:
    """What a value refers to, by name; "" for what replaces it. `whole` looks into objects of any class."""
    if isinstance(value, FunctionType):
        return of_function(value)
    if isinstance(value, MethodType):
        return of_method(value)
    if isinstance(value, partial):
        return of_partial(cast("partial[Any]", value))
    if isinstance(value, (list, tuple)):
        return [(str(number), part) for number, part in enumerate(cast("list[Any]", value))]
    if isinstance(value, dict):
        return [(str(key), part) for key, part in cast("dict[Any, Any]", value).items()]
    if whole and callable(value) and not isinstance(value, type):
        return [*attributes(value), ("", type(value).__call__)]
    return []


def attributes(value: Any) -> list[tuple[str, Any]]:
    """What an object holds, by name."""
    return list(vars(value).items()) if hasattr(value, "__dict__") else []


def of_method(method: MethodType) -> list[tuple[str, Any]]:
    """The module whose method it is, or what another object holds and its method refers to."""
    owner = method.__self__
    return [("", owner)] if isinstance(owner, nn.Module) else [*attributes(owner), ("", method.__func__)]


def of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """A function's closure, defaults and globals."""
    if str(function.__module__).partition(".")[0] in LIBRARIES:
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    defaults, count = function.__defaults__ or (), code.co_argcount
    yield from zip(code.co_varnames[count - len(defaults) : count], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from ((name, function.__globals__[name]) for name in globals_of(code) if name in function.__globals__)


def globals_of(code: CodeType) -> Iterator[str]:
    """The names of the globals that a function reads, and those that are defined inside it."""
    yield from dict.fromkeys(str(i.argval) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from globals_of(inner)


def of_partial(value: partial[Any]) -> Iterator[tuple[str, Any]]:
    """The arguments that a `partial` holds, by the names of the function's parameters, and the function."""
    yield from zip(positional(value.func, len(value.args)), value.args, strict=True)
    yield from value.keywords.items()
    yield "", value.func


def positional(function: Callable[..., Any], count: int) -> list[str]:
    """Names for the first arguments of a function: its parameters', or numbers."""
    try:
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else str(i) for i in range(count)]
