"""Whether autocast is on, and blocks without it; tensors without memory are cast in a `MetaAutocast` alone."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)

META_CASTS: list[torch.dtype | None] = [None]
"""The type that calls on tensors without memory are cast to, innermost block last; None: they are not."""


def is_autocast(device: torch.device) -> bool:
    """Whether calls on that device are cast."""
    if device.type == "meta":
        return META_CASTS[-1] is not None
    return torch.is_autocast_enabled(device.type)


def in_plain_type(x: T, probe: Callable[[Tensor], Tensor]) -> T:
    """The tensor in the type of torch's own result: under autocast, torch is asked with one small image."""
    if not is_autocast(x.device):
        return x
    small = torch.ones((1, 1, *(4,) * (x.ndim - 2)), dtype=x.dtype, device=x.device)
    with torch.no_grad():
        plain = probe(small).dtype
    return x.to(plain)  # type: ignore[return-value]


Casts = tuple[str, bool, torch.dtype]
"""A kind of device, whether calls on it are cast, and to which type."""


def casts() -> tuple[Casts, ...]:
    """What torch casts on each kind of device."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which nothing is cast."""
    return meta_casts(None) if device.type == "meta" else torch.autocast(device.type, enabled=False)


@contextmanager
def uncached_autocast() -> Generator[None]:
    """A block in which autocast casts parameters anew: no casts from before are there."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def meta_casts(dtype: torch.dtype | None) -> Generator[None]:
    """A block in which calls on tensors without memory are cast to that type, or not at all."""
    META_CASTS.append(dtype)
    try:
        yield
    finally:
        META_CASTS.pop()
