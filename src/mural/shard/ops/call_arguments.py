"""The arguments of a call, by the names of torch's signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def dim_of(dim: int, ndim: int, name: str) -> int:
    """A dim counted from the start."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"{name}: dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % ndim


def bound(args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str], *defaults: Any) -> list[Any]:
    """Arguments in the order of their names; the last names have the defaults."""
    if not kwargs and len(args) == len(names):
        return list(args)
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    unknown = [k for k, v in kwargs.items() if k not in names and v is not None]
    if unknown or len(args) > len(names):
        raise TypeError(
            f"unexpected arguments {unknown or args[len(names) :]}: a rule for sharded tensors takes {names}"
        )
    values |= dict(zip(names, args, strict=False)) | kwargs
    if missing := [name for name in names if name not in values]:
        raise TypeError(f"missing arguments {missing}")
    return [values[name] for name in names]


def dims_of(dim: Any, ndim: int, name: str) -> tuple[int, ...]:
    """The dims that a reduction runs over; none given means all."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    return tuple(dim_of(d, ndim, name) for d in ((dim,) if isinstance(dim, int) else dim))
