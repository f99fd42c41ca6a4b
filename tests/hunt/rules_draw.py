"""Random arguments of calls, the same for the same name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments."""


class Draw:
    """Random arguments, the same for the same name."""

    def __init__(self, name: str):
        self.random = random.Random(name)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(40))

    def of(self, *choices: Any) -> Any:
        """One of some values."""
        return self.random.choice(choices)

    def int(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.random.randint(low, high)

    def ints(self, count: int, low: int, high: int) -> tuple[int, ...]:
        """Some whole numbers."""
        return tuple(self.int(low, high) for _ in range(count))

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self.generator)

    def extents(self, dims: int) -> tuple[int, ...]:
        """The extents of an image."""
        return self.ints(dims, *{1: (5, 17), 2: (4, 11), 3: (3, 7)}[dims])

    def image(self, dims: int = 2, channels: int = 3) -> Tensor:
        """A batch of images."""
        return self.normal(self.int(1, 3), channels, *self.extents(dims))

    def dim(self, tensor: Tensor) -> int:
        """A dim, from the front or the back."""
        return self.int(-tensor.ndim, tensor.ndim - 1)

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        """Some dims."""
        return tuple(sorted(self.random.sample(range(tensor.ndim), self.int(1, tensor.ndim))))


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """A call that has not been made."""
    return function, args, kwargs


def method(name: str) -> Callable[..., Any]:
    """A method of tensors as a function."""
    return getattr(Tensor, name)
