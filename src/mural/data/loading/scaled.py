"""Scaled sources: an image whose numbers are read as a model takes them, by the conversion that training uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from mural.data.loading.pixels import Pixels, Scale, per_channel
from mural.data.source import Box, Source

Scaling = Scale | Literal["none"]
"""What `scale` may be; "none" takes the numbers as they are, as floating ones."""


class ScaledSource(Source):
    """A source whose boxes are floating numbers, converted by some `pixels`."""

    def __init__(self, source: Source, pixels: Pixels):
        pixels.check_channels(source)
        self.source, self.pixels = source, pixels
        self.name, self.shape, self.dtype = source.name, source.shape, pixels.dtype
        self.levels, self.chunks, self.counter = source.levels, source.chunks, source.counter

    def read(self, box: Box | None = None, level: int = 0) -> Tensor:
        """See `Source`."""
        raw = self.source.read(box, level)
        values = raw.to(self.pixels.work, copy=True)
        self.pixels.rescale(values, raw.dtype)
        first = 0 if box is None else box[0][0]
        self._of_channels(first, first + len(values)).normalise(values)
        return values.to(self.dtype)

    def _of_channels(self, start: int, stop: int) -> Pixels:
        """The conversion of some channels."""
        own = {k: v for k in ("mean", "std") if (v := getattr(self.pixels, k)) is not None and len(v) > 1}
        return replace(self.pixels, **{name: values[start:stop] for name, values in own.items()})

    def converted(self, dtype: torch.dtype) -> ScaledSource:
        """The same in another floating type: what is computed in it is not rounded before."""
        return ScaledSource(self.source, replace(self.pixels, dtype=dtype))

    def close(self) -> None:
        """Let go of files; a later `read` takes them up again."""
        self.source.close()


def scaled(
    source: Source,
    scale: Scaling = "range",
    mean: Sequence[float] | float | None = None,
    std: Sequence[float] | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Source:
    """A source as a model takes it: scaled, then minus the mean and divided by the deviation of each channel.

    `scale` is that of a run's [data]: "range" maps integers to [0, 1] by the range of their type, a number divides, a
    pair (low, high) becomes 0 and 1, "none" (or None) takes the values as they are.

    >>> from mural.data.sets.memory_sources import ArraySource
    >>> scaled(ArraySource(torch.tensor([[0, 51, 255]], dtype=torch.uint8))).read().tolist()
    [[[0.0, 0.20000000298023224, 1.0]]]
    """
    how = None if scale == "none" else scale
    return ScaledSource(source, Pixels(how, per_channel(mean), per_channel(std), dtype))
