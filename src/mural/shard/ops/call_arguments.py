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
    given, required = len(args), len(names) - len(defaults)
    if not kwargs and required <= given <= len(names):
        return [*args, *defaults[given - required :]]
    unknown = [key for key, value in kwargs.items() if key not in names[given:] and value is not None]
    if unknown or given > len(names):
        raise TypeError(
            f"unexpected arguments {unknown or args[len(names) :]}: a rule for sharded tensors takes {names}"
        )
    if missing := [name for name in names[given:required] if name not in kwargs]:
        raise TypeError(f"missing arguments {missing}")
    by_name = [kwargs[name] for name in names[given:required]]
    first = max(given, required)
    optional = zip(names[first:], defaults[first - required :], strict=True)
    return [*args, *by_name, *(kwargs.get(name, default) for name, default in optional)]


def dims_of(dim: Any, ndim: int, name: str) -> tuple[int, ...]:
    """The dims that a reduction runs over; none given means all."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    return tuple(dim_of(d, ndim, name) for d in ((dim,) if isinstance(dim, int) else dim))
