"""What torch would make of a shape: it is asked itself, with tensors without memory, which nobody else gets to see."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def unseen() -> Generator[None]:
    """A block past all modes: a rehearsal would count what is asked here as memory of the step."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def result_for(func: Callable[..., Any], shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """What an operation gives for a tensor of that shape; other tensors of the call stand for their shapes.

    >>> tuple(result_for(torch.flatten, (2, 3, 4), 1).shape)
    (2, 12)
    """
    shapes = [tuple(a.shape) if isinstance(a, Tensor) else None for a in args]
    with unseen():
        given = [a if shape is None else probe_of(shape) for a, shape in zip(args, shapes, strict=True)]
        return func(probe_of(shape), *given, **kwargs)


def probe_of(shape: Sequence[int]) -> Tensor:
    """A tensor of that shape, without memory."""
    return torch.empty(tuple(shape), device="meta")


def order_after(func: Callable[..., Any], ndim: int, *args: Any, **kwargs: Any) -> list[int]:
    """The order into which a permutation brings that many dims: their numbers are the probe's strides.

    >>> order_after(torch.transpose, 3, 0, 2)
    [2, 1, 0]
    """
    with unseen():
        probe = torch.empty_strided((2,) * ndim, tuple(range(1, ndim + 1)), device="meta")
        return [stride - 1 for stride in func(probe, *args, **kwargs).stride()]
