"""What modules have in common: attributes of their classes, variables past them that their methods name, and Python's
own generators; kept, put back and compared as `held.py` does it for each module.

    CALLS = [0]

    class Layer(nn.Module):
        scale = 1.0                     an attribute of the class

        def forward(self, x):
            CALLS[0] += 1               a global variable; one of an enclosing function counts as well
            Layer.scale *= 0.9
"""

from __future__ import annotations

import dis
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from torch import nn

from mural.graph.kept import MUTABLE, Kept, content, kept, moved, renew

Name = tuple[str, str]
"""A class, a module of code or a generator, and an attribute or variable of it."""
METHODS = (property, staticmethod, classmethod)
FOREIGN = ("torch", "builtins", "mural", "typing")
"""Whose classes hold nothing that a forward changes."""
DRAWS = (("random", ""), ("numpy.random", ""))
"""The names of what Python's own generators leave."""


@dataclass(frozen=True)
class Variable:
    """A variable past a class that its methods name: a global one, or one of an enclosing function."""

    owner: str
    name: str
    holder: Any = field(compare=False)

    @property
    def value(self) -> Any:
        """What it is now."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.name)
        try:
            return self.holder.cell_contents
        except ValueError:  # it has no value yet
            return None

    def put(self, value: Any) -> None:
        """Give it a value."""
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            self.holder.cell_contents = value


@dataclass
class Commons:
    """What some classes have in common at one time."""

    classes: dict[type, dict[str, Kept]]
    variables: dict[Variable, Kept]
    states: tuple[Any, Any]

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> Commons:
        """What the classes of modules have now."""
        kinds = {kind for own in {type(m) for m in modules} for kind in own_kinds(own)}
        classes = {kind: {n: kept(v) for n, v in vars(kind).items() if is_state(n, v)} for kind in kinds}
        variables = {v: kept(v.value) for kind in kinds for v in variables_of(kind) if v.value is not None}
        return cls(classes, variables, drawn())

    def put_back(self) -> None:
        """Make everything what it was."""
        for kind, before in self.classes.items():
            for name, was in before.items():
                if vars(kind).get(name) is not was.value:
                    setattr(kind, name, was.value)
                renew(was)
        for variable, was in self.variables.items():
            if variable.value is not was.value:
                variable.put(was.value)
            renew(was)
        for now, before, put in zip(drawn(), self.states, (random.setstate, np.random.set_state), strict=True):
            if not alike(now, before):
                put(before)

    def changes(self) -> dict[Name, Any]:
        """What is no longer as it was, by name, with what it is now."""
        found: dict[Name, Any] = {}
        for kind, before in self.classes.items():
            now = {n: v for n, v in vars(kind).items() if is_state(n, v)}
            found |= {(kind.__qualname__, n): content(v, True) for n, v in now.items() if moved(v, before.get(n))}
        for v, was in self.variables.items():
            if moved(v.value, was):
                found[v.owner, v.name] = content(v.value, True)
        for name, now, before in zip(DRAWS, drawn(), self.states, strict=True):
            if not alike(now, before):
                found[name] = now
        return found


def drawn() -> tuple[Any, Any]:
    """The states of Python's own generators: `random`, and numpy's old one."""
    return random.getstate(), np.random.get_state()


def alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two states are equal: tuples of numbers, tuples of numbers and arrays."""
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in zip(one, other, strict=True))


@lru_cache(maxsize=4096)
def own_kinds(kind: type) -> tuple[type, ...]:
    """The classes of the user that a class consists of."""
    return tuple(k for k in kind.__mro__ if not k.__module__.startswith(FOREIGN))


def is_state(name: str, value: Any) -> bool:
    """Whether a class attribute is data that a forward may change."""
    return not name.startswith("__") and not isinstance(value, METHODS) and not callable(value)


@lru_cache(maxsize=4096)
def variables_of(kind: type) -> tuple[Variable, ...]:
    """The variables past a class that its methods set, or whose content they may change."""
    found: dict[Variable, None] = {}
    for function in vars(kind).values():
        if not isinstance(function, FunctionType):
            continue
        codes = list(codes_in(function.__code__))
        stored = {
            i.argval
            for code in codes
            for i in dis.get_instructions(code)
            if i.opname in ("STORE_GLOBAL", "STORE_DEREF")
        }
        for name in {name for code in codes for name in code.co_names}:
            value = function.__globals__.get(name)
            if name in stored or isinstance(value, MUTABLE):
                found[Variable(function.__module__, name, function.__globals__)] = None
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            variable = Variable(function.__qualname__, name, cell)
            if name in stored or isinstance(variable.value, MUTABLE):
                found[variable] = None
    return tuple(found)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
