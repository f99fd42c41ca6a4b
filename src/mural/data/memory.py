"""Sources in memory: a tensor, an array, or a function that computes a box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mural import geometry
from mural.data.source import Box, Counter, Level, Source, checked_box, level_of
from mural.errors import DataError


class ArraySource(Source):
    """An image in memory as a source: (C, H, W) or (C, D, H, W); an array (H, W) is taken as one channel.

    >>> source = ArraySource(np.arange(12).reshape(3, 4), name="twelve")
    >>> source.shape, source.read([(0, 1), (1, 3), (0, 2)]).tolist()
    ((1, 3, 4), [[[4, 5], [8, 9]]])
    """

    def __init__(self, array: Any, name: str = "an array"):
        values = array.detach() if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
        if values.ndim not in (2, 3, 4):
            raise DataError(
                f"{name}: an image has the shape (H, W), (C, H, W) or (C, D, H, W), not {tuple(values.shape)}", name
            )
        self.values = values[None] if values.ndim == 2 else values
        self.name, self.dtype = name, self.values.dtype
        self.shape = self.chunks = tuple(self.values.shape)
        self.chunks = (self.shape[0], *(1,) * (len(self.shape) - 1))
        self.levels = (Level(self.shape, (1.0,) * len(self.shape)),)
        self.counter = Counter()

    def read(self, box: Box | None = None, level: int = 0) -> Tensor:
        """See `Source`: a view of the array, which stays as it is only if nobody writes to it."""
        level_of(self, level)
        place = checked_box(self.name, box, self.shape)
        part = self.values[tuple(slice(*interval) for interval in place)]
        self.counter.add(reads=1, bytes_=part.numel() * part.element_size())
        return part


class ComputedSource(Source):
    """An image that a function computes box by box: `compute(box)` gives the pixels of a box, channels first.

    Boxes must agree where they overlap, and threads call the function at the same time.

    >>> ramp = ComputedSource(lambda box: torch.arange(*box[2]).expand(1, box[1].size, -1), (1, 5, 9), torch.int64)
    >>> ramp.read([(0, 1), (2, 4), (6, 9)]).tolist()
    [[[6, 7, 8], [6, 7, 8]]]
    """

    def __init__(
        self,
        compute: Callable[[geometry.Box], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        name: str = "a computed image",
    ):
        if len(shape) not in (3, 4):
            raise DataError(f"{name}: an image has the shape (C, H, W) or (C, D, H, W), not {tuple(shape)}", name)
        self.compute, self.name, self.dtype, self.shape = compute, name, dtype, tuple(shape)
        self.chunks = (self.shape[0], *(1,) * (len(self.shape) - 1))
        self.levels = (Level(self.shape, (1.0,) * len(self.shape)),)
        self.counter = Counter()

    def read(self, box: Box | None = None, level: int = 0) -> Tensor:
        """See `Source`."""
        level_of(self, level)
        place = checked_box(self.name, box, self.shape)
        part = self.compute(place)
        if tuple(part.shape) != tuple(i.size for i in place):
            raise DataError(
                f"{self.name}: the function gave {tuple(part.shape)} for the box {[tuple(i) for i in place]}: "
                f"it must give one value per position of the box, channels first",
                self.name,
                box,
            )
        self.counter.add(reads=1, bytes_=part.numel() * part.element_size())
        return part.to(self.dtype)
