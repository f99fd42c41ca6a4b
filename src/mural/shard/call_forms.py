"""The forms in which torch takes a call, brought to one before a rule sees it: keywords as positions, `out=` as a copy.

Users write `torch.reshape(input=x, shape=s)`, `torch.max(x, axis=1)` and `torch.add(x, y, out=z)`. A rule gets
`(x, s)`, `(x, 1)` and `(x, y)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.table import KINDS, TABLE, name_of

NUMPY = {"axis": "dim", "keepdims": "keepdim", "a": "input", "x": "input", "x1": "input", "x2": "other"}
"""NumPy's names, which torch takes for its own."""

BY_NAME = ("memory_format", "dtype", "device", "layout", "generator")
"""What Python's signatures take by name alone, also where the schema allows a position."""

_builtin: Any = torch._C  # torch's stubs leave its submodules out


def usual_form(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with its first arguments by position, as far as torch's signature allows, and torch's own names.

    >>> usual_form(torch.where, (), {"other": 0, "input": 1, "condition": True})
    ((True, 1, 0), {})
    >>> usual_form(torch.sum, (2.0,), {"axis": 1, "dtype": torch.float64})
    ((2.0, 1), {'dtype': torch.float64})
    """
    if not kwargs:
        return args, kwargs
    order, names = keyword_order(func, len(args), tuple(kwargs))
    if not order and not names:
        return args, kwargs
    rest = {names.get(key, key): value for key, value in kwargs.items() if key not in order}
    return (*args, *(kwargs[key] for key in order)), rest


@lru_cache(maxsize=4096)
def keyword_order(func: Any, given: int, keys: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The keywords that stand for the next positions of a call with so many others, and what others are renamed to."""
    # Python's functions have an order of their own: weight and running_mean change places in F.instance_norm.
    for names, positions in () if isinstance(func, FunctionType) else signatures(getattr(func, "__name__", "")):
        own = {key: renamed(key, names) for key in keys}
        if set(own.values()) <= set(names) and given <= positions:
            by_name = {name: key for key, name in own.items()}
            order: list[str] = []
            for name in names[given:positions]:
                if name not in by_name or name in BY_NAME:
                    break
                order.append(by_name[name])
            return tuple(order), {k: n for k, n in own.items() if k != n and n != "self" and k not in order}
    # A function of Python's, which torch hands over with its input first, or an operation without a schema.
    first = next((k for k in ("input", "self", "x") if k in keys), None) if not given else None
    other = {k: NUMPY[k] for k in keys if k in ("axis", "keepdims")}
    return ((first,) if first else ()), other


@lru_cache(maxsize=2048)
def signatures(name: str) -> tuple[tuple[tuple[str, ...], int], ...]:
    """The argument names of each overload of one of torch's operations, and how many of them may be positions."""
    found: list[tuple[tuple[str, ...], int]] = []
    for schema in _builtin._jit_get_schemas_for_operator(f"aten::{name}"):
        positions = sum(not a.kwarg_only for a in schema.arguments)
        found.append((tuple(a.name for a in schema.arguments), positions))
    return tuple(found)


def renamed(key: str, names: tuple[str, ...]) -> str:
    """A keyword as the signature calls it: Python's `input` is `self` there."""
    if key not in names:
        key = NUMPY.get(key, key)
    return "self" if key == "input" and key not in names else key


def write_out(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call with `out=`: its result is computed, then copied into the tensors that were given."""
    name, out = name_of(func), kwargs["out"]
    rest = {key: value for key, value in kwargs.items() if key != "out"}
    if func not in TABLE or KINDS.get(name) in ("random", "creation"):
        raise UnsupportedOp(f"{name}(…, out=…) is not supported for sharded tensors: use its result")
    targets: tuple[Tensor, ...] = (out,) if isinstance(out, Tensor) else tuple(out)
    operands = [value for value in (*args, *rest.values(), *targets) if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        raise UnsupportedOp(
            f"{name}(…, out=…) of tensors that require a gradient: torch has none for it. Use its result"
        )
    result = func(*args, **rest)
    values: tuple[Any, ...] = (result,) if isinstance(result, Tensor) else tuple(result)
    if len(values) != len(targets):
        raise UnsupportedOp(f"{name}(…, out=…) has {len(values)} results, but out= holds {len(targets)} tensors")
    for target, value in zip(targets, values, strict=True):
        if tuple(target.shape) != tuple(value.shape) or target.dtype != value.dtype:
            raise UnsupportedOp(
                f"{name}(…, out=…): the result has shape {tuple(value.shape)} and type {value.dtype}, out= has "
                f"{tuple(target.shape)} and {target.dtype}, and a sharded tensor is not resized or converted: give "
                f"one of the result's shape and type, or use the result"
            )
        target.copy_(value)
    return out if isinstance(result, Tensor) else type(result)(targets)
