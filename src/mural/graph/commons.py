"""What modules have in common: attributes of their classes, variables outside them that their forward names, and
Python's own generators; kept, put back and compared as `held_state.py` does for each module.

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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import nn

from mural.graph.kept_values import MUTABLE, KeptValue, content, kept, moved, renew

Name = tuple[str, str]
"""A class, a module of code or a generator, and an attribute or variable of it."""
METHODS = (property, staticmethod, classmethod)
FOREIGN = ("torch", "builtins", "mural", "typing")
"""Whose classes hold nothing that a forward changes."""
HELD = (FunctionType, MethodType, partial)
"""The types of functions that modules hold."""
DRAWS = (("random", ""), ("numpy.random", ""))
"""The names of what Python's own generators leave."""


@dataclass(frozen=True)
class Variable:
    """A variable outside a class that its methods name: a global one, or one of an enclosing function."""

    owner: str
    name: str
    holder: Any = field(compare=False)
    key: int = field(init=False)
    """The holder's `id`: functions that one function makes have variables of the same names."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", id(self.holder))

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

    classes: dict[type, dict[str, KeptValue]]
    variables: dict[Variable, KeptValue]
    states: tuple[Any, Any]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], hooks: bool = False) -> Commons:
        """What the classes of modules have now, and what their `hooks` hold, if asked for."""
        modules = list(modules)
        own = {type(m) for m in modules}
        kinds = {base for kind in own for base in own_kinds(kind)}
        classes = {kind: {n: kept(v) for n, v in vars(kind).items() if is_state(n, v)} for kind in kinds}
        named = [*(v for kind in own for v in variables_of(kind)), *variables_in(held_functions(modules))]
        named += variables_of_hooks(modules) if hooks else ()
        variables = {v: kept(v.value) for v in named if v.value is not None}
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
        met = Counter[Name]()
        for v, was in self.variables.items():
            met[v.owner, v.name] += 1  # functions that one function made have variables of one name
            if moved(v.value, was):
                place = met[v.owner, v.name]
                found[v.owner, v.name if place == 1 else f"{v.name} ({place})"] = content(v.value, True)
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
    """The variables outside a class that its forward may change: those named in it, or in methods and functions that it
    calls, as far as these are of the same package.
    """
    kinds = own_kinds(kind)
    return variables_in(
        (f for k in kinds for name, v in vars(k).items() if is_run(name) for f in functions_in(v)), kinds
    )


def held_functions(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """The functions that modules hold as attributes, which their forward may call: a loss, an activation."""
    held = (value for module in modules for value in vars(module).values() if isinstance(value, HELD))
    yield from (f for value in held for f in functions_in(value) if not (f.__module__ or "").startswith(FOREIGN))


def variables_of_hooks(modules: Iterable[nn.Module]) -> Iterator[Variable]:
    """The variables outside hooks of forward that they may change, and the objects that hold theirs."""
    hooks = [hook for m in modules for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    yield from variables_in(
        f for hook in hooks for f in functions_in(hook) if not (f.__module__ or "").startswith(FOREIGN)
    )
    for owner in (hook.__self__ if isinstance(hook, MethodType) else hook for hook in hooks):
        if not isinstance(owner, (FunctionType, nn.Module)) and not type(owner).__module__.startswith(FOREIGN):
            yield Variable(type(owner).__qualname__, "hook", {"hook": owner})


def variables_in(functions: Iterable[FunctionType], kinds: Sequence[type] = ()) -> tuple[Variable, ...]:
    """The variables outside functions that they may change, and the methods of some classes that they name."""
    found: dict[Variable, None] = {}
    waiting = list(functions)
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        stored, package = stored_in(function.__code__), package_of(function)
        names = {name for code in codes_in(function.__code__) for name in code.co_names}
        waiting += [f for k in kinds for name in names & vars(k).keys() for f in functions_in(vars(k)[name])]
        for variable in named_by(function, names):
            value = variable.value
            waiting += [f for f in functions_in(value) if package_of(f) == package]
            own = package_of(type(value)) == package and not isinstance(value, nn.Module)
            if variable.name in stored or isinstance(value, MUTABLE) or own:
                found[variable] = None
    return tuple(found)


def is_run(name: str) -> bool:
    """Whether a method may run in a forward pass without being named in it: forward itself, and operators."""
    return name == "forward" or (name.startswith("__") and name not in ("__init__", "__new__", "__init_subclass__"))


def package_of(kind: Any) -> str:
    """The package that a class or function is of."""
    return str(getattr(kind, "__module__", "")).partition(".")[0]


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions of a method, as it is written or under decorators."""
    if isinstance(value, (staticmethod, classmethod)):
        yield from functions_in(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from functions_in(part)
    elif isinstance(value, partial):
        yield from functions_in(value.func)
    elif isinstance(value, MethodType):
        yield from functions_in(value.__func__)
    elif isinstance(value, FunctionType):
        yield value
        yield from functions_in(getattr(value, "__wrapped__", None))


def named_by(function: FunctionType, names: set[str]) -> Iterator[Variable]:
    """The global variables among the names in a function, and those of the functions around it."""
    for name in names & function.__globals__.keys():
        yield Variable(function.__module__, name, function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Variable(function.__qualname__, name, cell)


def stored_in(code: CodeType) -> set[str]:
    """The variables outside a function that it sets."""
    steps = (step for inner in codes_in(code) for step in dis.get_instructions(inner))
    return {step.argval for step in steps if step.opname in ("STORE_GLOBAL", "STORE_DEREF")}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
