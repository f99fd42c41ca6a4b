"""Pixels: how the numbers in a file become what a model takes, every value by itself; and sources read that way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mural.data.loading.label_range import LabelRange
from mural.data.source import Box, Source
from mural.errors import DataError, UnfitData

Scale = Literal["range"] | float | tuple[float, float] | None
MaskKind = Literal["classes", "values", "channels"]


@dataclass(frozen=True)
class Pixels:
    """The conversion of images and masks.

    `scale` maps integer images to [0, 1] by the range of their type ("range"); a number divides by it, a pair (low,
    high) maps these two to 0 and 1, None leaves the values. `mean` and `std`, one per channel, follow after
    augmentation. A mask holds `classes` (one channel, int64, without a channel dim), `values` (the same, floating) or
    `channels` (floating, with its channel dim, for BCE); `labels` replaces classes in masks and labels, as {255: 1}.
    What is then not a label of `label_range` is an error.
    """

    scale: Scale = "range"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    dtype: torch.dtype = torch.float32
    mask: MaskKind = "classes"
    labels: Mapping[int, int] | None = None
    label_range: LabelRange | None = None

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise DataError(f"dtype={self.dtype}: images become floating numbers, as in torch.float32")
        if self.mask not in ("classes", "values", "channels"):
            raise DataError(f"mask={self.mask!r} is not one of 'classes', 'values', 'channels'")
        if self.std is not None and not all(value > 0 for value in self.std):
            raise DataError(f"std={self.std}: a deviation must be above 0")
        if isinstance(self.scale, str) and self.scale != "range":
            raise DataError(f"scale={self.scale!r}: give 'range', a number, a pair (low, high) or None")

    @property
    def work(self) -> torch.dtype:
        """The type that images are computed in, before they become `dtype`."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def rescale(self, values: Tensor, stored: torch.dtype) -> None:
        """Bring an image's values, as a file of some type held them, between 0 and 1, in place."""
        low, high = self.limits(stored)
        if low:
            values.sub_(low)
        if high - low != 1:
            values.div_(numbers([high - low], values))

    def limits(self, dtype: torch.dtype) -> tuple[float, float]:
        """The values of a type of file that become 0 and 1."""
        if self.scale is None:
            return 0, 1
        if isinstance(self.scale, tuple):
            return self.scale
        if self.scale != "range":
            return 0, float(self.scale)
        if dtype == torch.bool or dtype.is_floating_point:
            return 0, 1
        found = torch.iinfo(dtype)
        return found.min, found.max

    def normalise(self, piece: Tensor) -> None:
        """Subtract the mean and divide by the deviation of each channel, in place."""
        if self.mean is not None:
            piece.sub_(numbers(self.mean, piece))
        if self.std is not None:
            piece.div_(numbers(self.std, piece))

    def check_channels(self, image: Source) -> None:
        """Raise unless mean and deviation fit an image."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, image.shape[0]):
                raise UnfitData(
                    f"{image.name}: {name}={values} has {len(values)} numbers, but the image {image.shape[0]} "
                    f"channels: give one for each channel",
                    image.name,
                )
        if image.dtype.is_complex:
            raise UnfitData(
                f"{image.name}: holds complex numbers: store real and imaginary part as channels", image.name
            )

    def target(self, raw: Tensor, source: Source, at: Sequence[int] = ()) -> Tensor:
        """The values of a mask (C, …) from some place on, checked, and with their classes replaced."""
        if self.mask == "classes" and raw.is_floating_point() and bool((raw != raw.round()).any()):
            raise UnfitData(
                f"{source.name}: the mask holds fractions, which are not classes: take mask='values' to learn values",
                source.name,
            )
        found = self.relabelled(raw if raw.is_floating_point() else raw.long()) if self.labels else raw
        if self.label_range is not None and (self.mask == "classes" or self.label_range.classes is None):
            self.label_range.check(found, source.name, self.labels or {}, at=at)
        return found

    def label(self, label: Tensor, name: str) -> Tensor:
        """The label of a sample, checked and replaced; values stay as they are."""
        if label.is_floating_point():
            return label
        found = self.relabelled(label) if self.labels else label
        if self.label_range is not None:
            self.label_range.check(found, name, self.labels or {}, label=True)
        return found

    @property
    def target_dtype(self) -> torch.dtype:
        """The type of masks."""
        return torch.int64 if self.mask == "classes" else self.dtype

    def relabelled(self, values: Tensor) -> Tensor:
        """The values with some classes replaced."""
        found = values.clone()
        for old, new in (self.labels or {}).items():
            found[values == old] = new
        return found


def numbers(values: Sequence[float], like: Tensor) -> Tensor:
    """One number per channel, or one for all, next to a tensor (C, …).

    A GPU divides by a number of Python's by multiplying, which rounds differently, and waits for one that is copied.
    """
    each = [torch.full((1,) * like.ndim, value, dtype=like.dtype, device=like.device) for value in values]
    return torch.cat(each)


def per_channel(values: Sequence[float] | float | None) -> tuple[float, ...] | None:
    """One number per channel, from a number or several.

    >>> per_channel(0.5), per_channel([0.1, 0.2])
    ((0.5,), (0.1, 0.2))
    """
    if values is None:
        return None
    return (float(values),) if isinstance(values, int | float) else tuple(float(v) for v in values)


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
        return self.values_of(self.source.read(box, level), 0 if box is None else box[0][0])

    @property
    def stored(self) -> Source:
        """The source as it is stored."""
        return self.source

    def values_of(self, raw: Tensor, first: int = 0) -> Tensor:
        """What is read for pixels (C, …) of the stored source, on any device; `first` is the first of its channels."""
        values = raw.to(self.pixels.work, copy=True)
        self.pixels.rescale(values, raw.dtype)
        self._of_channels(first, first + len(values)).normalise(values)
        return values.to(self.dtype)

    def same_values(self, other: object) -> bool:
        """Whether another source is converted in the same way."""
        return isinstance(other, ScaledSource) and other.pixels == self.pixels

    def _of_channels(self, start: int, stop: int) -> Pixels:
        """The conversion of some channels."""
        own = {k: v for k in ("mean", "std") if (v := getattr(self.pixels, k)) is not None and len(v) > 1}
        return replace(self.pixels, **{name: values[start:stop] for name, values in own.items()})

    def converted(self, dtype: torch.dtype) -> ScaledSource:
        """The same in another floating type: what is computed in it is not rounded before."""
        return ScaledSource(self.source, replace(self.pixels, dtype=dtype))

    def close(self) -> None:
        """Release files; a later `read` opens them again."""
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
