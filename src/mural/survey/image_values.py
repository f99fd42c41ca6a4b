"""The values of images, from a sample of their pixels, and how they are scaled for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from mural.data.open import open as open_source
from mural.errors import DataError
from mural.survey.sampled_boxes import Progress, boxes, spread, told

MOST_IMAGES, MOST_POSITIONS = 32, 2**18
"""Images that are looked at, and positions of each."""
FEWEST_BITS = 8


@dataclass(frozen=True)
class ImageValues:
    """The range of finite values, and mean and deviation of each channel; `strange` if others are among them."""

    low: float
    high: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    strange: bool = False


@dataclass(frozen=True)
class Scaling:
    """What [data] says about values of images; nothing where the defaults do."""

    scale: float | str = "range"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    why: str = ""


def values_in_images(images: Sequence[Path], progress: Progress) -> tuple[ImageValues | None, dict[Path, str]]:
    """The values of some of the images, and why some of these cannot be read."""
    chosen, every, bad = spread(images, MOST_IMAGES), list[Moments](), dict[Path, str]()
    for path, found in zip(chosen, told("images", moments_of, chosen, progress), strict=True):
        if isinstance(found, str):
            bad[path] = found
        else:
            every.append(found)
    if not every:
        return None, bad
    all_ = reduce(Moments.with_, every)
    std = (all_.squares / all_.count.clamp(min=1)).sqrt()
    return ImageValues(all_.low, all_.high, tuple(all_.mean.tolist()), tuple(std.tolist()), all_.strange), bad


@dataclass(frozen=True)
class Moments:
    """Of the finite values of a sample: how many there are in each channel, their mean, and their squared distance."""

    count: Tensor
    mean: Tensor
    squares: Tensor
    low: float
    high: float
    strange: bool

    def with_(self, other: Moments) -> Moments:
        """The moments of both samples."""
        count = (self.count + other.count).clamp(min=1)
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart.square() * self.count * other.count / count,
            min(self.low, other.low),
            max(self.high, other.high),
            self.strange or other.strange,
        )


def moments_of(path: Path) -> Moments | str:
    """The moments of a sample of an image, or why it cannot be read."""
    try:
        with open_source(path, threads=1) as source:
            chosen, _ = boxes(source, MOST_POSITIONS)
            parts = [thinned(source.read(box).flatten(1)).double() for box in chosen]
    except DataError as error:
        return str(error)
    values = torch.cat(parts, 1)
    finite = values.isfinite()
    seen, count = values[finite], finite.sum(1)
    mean = torch.where(finite, values, 0).sum(1) / count.clamp(min=1)
    squares = torch.where(finite, values - mean[:, None], 0).square().sum(1)
    low, high = (float(seen.min()), float(seen.max())) if seen.numel() else (0.0, 0.0)
    return Moments(count, mean, squares, low, high, not bool(finite.all()))


def thinned(values: Tensor) -> Tensor:
    """Every few of the values (C, positions): a file that is decoded as a whole may have many."""
    return values[:, :: max(1, values.shape[1] // MOST_POSITIONS)]


def scaling_of(dtype: torch.dtype, found: ImageValues | None) -> Scaling:
    """How images of a type with such values become numbers around 0 to 1.

    >>> scaling_of(torch.uint16, ImageValues(0, 4000, (900.0,), (300.0,))).scale
    4095
    >>> scaling_of(torch.int16, ImageValues(-1000, 3000, (50.0,), (400.0,))).mean
    (50.0,)
    """
    if found is None or dtype in (torch.uint8, torch.bool):
        return Scaling()
    extent = f"values are {found.low:g} to {found.high:g} in a sample"
    if not dtype.is_signed and found.high >= 1:
        bits = max(FEWEST_BITS, int(found.high).bit_length())
        full = 2**bits == torch.iinfo(dtype).max + 1
        return Scaling() if full else Scaling(2**bits - 1, why=f"{extent}: {bits} bits of {torch.iinfo(dtype).bits}")
    if dtype.is_floating_point and found.low >= 0 and found.high <= 1:
        return Scaling()
    mean = tuple(rounded(value) for value in found.mean)
    std = tuple(rounded(value) or 1.0 for value in found.std)
    return Scaling("none", mean, std, why=f"{extent}: to mean 0 and deviation 1")


def rounded(value: float) -> float:
    """A number in four digits.

    >>> rounded(123.456), rounded(-0.000123456)
    (123.5, -0.0001235)
    """
    return float(f"{value:.4g}")
