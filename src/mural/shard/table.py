"""The table of operations: which rule serves which torch function.

A rule is a function `rule(func, args, kwargs)` that gets the call as torch makes it and returns its result.
`register` enters it under every name by which torch offers the operation; what is not in the table raises
`UnsupportedOp`, so an operation is exact or refused, never passed through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

TABLE: dict[Any, tuple[str, Rule]] = {}
FOLDED: dict[str, Rule] = {}
"""Rules for tensors with merged dims (folds), by name; the one under "" settles tensors into plain dims first."""
RESHAPING = frozenset(
    ("transpose_", "t_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "set_")
)
"""In-place operations that change a tensor's shape: they have no rule."""
KINDS: dict[str, str] = {}
"""The kind of rule of each name in the table, as the documentation calls it."""

_builtin: Any = torch._C  # torch's stubs leave its submodules out
_HOMES: tuple[Any, ...] = (torch, torch.Tensor, F, _builtin._nn, torch.special, torch.linalg)


def functions(name: str) -> Iterator[Any]:
    """Every callable that torch offers under a name: as a function, a method, in `nn.functional`, …"""
    for home in _HOMES:
        found = getattr(home, name, None)
        if found is not None and callable(found):
            yield found


def register(kind: str, *names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operations of these names; an accessor's name is written `grad.__get__`."""

    def enter(rule: Rule) -> Rule:
        for name in names:
            attribute, _, accessor = name.partition(".")
            holder = getattr(torch.Tensor, attribute, None) if accessor else None
            found = [getattr(holder, accessor)] if holder is not None else list(functions(name))
            # Not found: an operation of another torch release.
            if found:
                KINDS[attribute] = kind
            for function in found:
                TABLE[function] = (name, rule)
        return rule

    return enter


def register_folded(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for tensors with merged dims."""

    def enter(rule: Rule) -> Rule:
        FOLDED.update(dict.fromkeys(names, rule))
        return rule

    return enter


def writes(name: str) -> bool:
    """Whether the operation of that name writes to its first argument.

    >>> [writes(name) for name in ("add_", "__setitem__", "__iadd__", "__add__", "__invert__")]
    [True, True, True, False, False]
    """
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def name_of(func: Any) -> str:
    """A function's name as a user knows it."""
    if func in TABLE:
        return TABLE[func][0]
    name = getattr(func, "__name__", repr(func))
    owner = getattr(getattr(func, "__self__", None), "__name__", None)  # accessors: the descriptor's name
    return f"{owner}.{name}" if owner and name in ("__get__", "__set__") else name
