"""Sources without a file: a tensor, an array, or a function that computes a box."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mural import geometry
from mural.data.source import Box, Counter, Level, Source, checked_box, level_of
from mural.errors import DataError
from mural.geometry import slices


class Unfiled(Source):
    """A source of one level that makes its boxes itself: a subclass says how, in `part`.

    It can be pickled; its counter then starts again at zero. It counts the bytes of what was asked for.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: torch.dtype, tile: Sequence[int] | None = None):
        if len(shape) not in (3, 4):
            raise DataError(f"{name}: an image has the shape (C, H, W) or (C, D, H, W), not {tuple(shape)}", name)
        self.name, self.shape, self.dtype = name, tuple(shape), dtype
        self.chunks = (self.shape[0], *(tile or (1,) * (len(shape) - 1)))
        self.levels = (Level(self.shape, (1.0,) * len(self.shape)),)
        self.counter = Counter()

    @abstractmethod
    def part(self, box: geometry.Box) -> Tensor:
        """The pixels of a box inside the image."""

    def read(self, box: Box | None = None, level: int = 0) -> Tensor:
        level_of(self, level)
        place = checked_box(self.name, box, self.shape)
        part = self.part(place)
        if tuple(part.shape) != tuple(i.size for i in place):
            raise DataError(
                f"{self.name}: {tuple(part.shape)} was made for the box {[tuple(i) for i in place]}: "
                f"it takes one value for each position of the box, channels first",
                self.name,
                box,
            )
        self.counter.add(reads=1, bytes_=part.numel() * part.element_size())
        return part

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "counter"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, counter=Counter())


class ArraySource(Unfiled):
    """An image in memory as a source: (C, H, W) or (C, D, H, W); an array (H, W) is taken as one channel.

    `read` returns views: do not write to them.

    >>> source = ArraySource(np.arange(12).reshape(3, 4), name="twelve")
    >>> source.shape, source.read([(0, 1), (1, 3), (0, 2)]).tolist()
    ((1, 3, 4), [[[4, 5], [8, 9]]])
    """

    def __init__(self, array: Any, name: str = "an array"):
        values = array.detach().cpu() if isinstance(array, Tensor) else torch.from_numpy(np.array(array))
        self.values = values[None] if values.ndim == 2 else values
        super().__init__(name, self.values.shape, self.values.dtype)

    def part(self, box: geometry.Box) -> Tensor:
        return self.values[slices(box)]


class ComputedSource(Unfiled):
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
        self.compute = compute
        super().__init__(name, shape, dtype)

    def part(self, box: geometry.Box) -> Tensor:
        return self.compute(box).to(self.dtype)
