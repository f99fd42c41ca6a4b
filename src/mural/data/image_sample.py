"""Samples: an image with its mask or label, each of them a path, a source, an array or a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mural.data.sets.memory_sources import ArraySource
from mural.data.source import Source
from mural.errors import UnfitData

Opener = Callable[[str], Source]


@dataclass(frozen=True)
class Sample:
    """An image, and what a model should predict for it: a mask, a label (class or value), or nothing (None).

    Image and mask are each a path, a `Source`, or an array or tensor (C, H, W), (C, D, H, W) or (H, W). A label is a
    number, or a tensor (K,) of K numbers.
    """

    name: str
    image: Any
    target: Any = None


@dataclass(frozen=True)
class BadSample:
    """A sample that was left out: its place in the dataset, its name, and why it could not be read."""

    index: int
    name: str
    reason: str


class Samples(Protocol):
    """A dataset: anything with a length that gives a `Sample`, or a pair (image, target), for each index.

    Each rank asks only for the samples of which it holds a part, in several threads. A method `name(index)` may say a
    sample's name without making the sample.
    """

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """The sample at an index."""
        ...


def sample_at(samples: Samples, index: int) -> Sample:
    """The sample at an index; a pair (image, target) becomes one."""
    found = samples[index]
    if isinstance(found, Sample):
        return found
    if isinstance(found, tuple) and len(found) == 2:
        return Sample(name_at(samples, index) or f"sample {index}", *found)
    raise UnfitData(
        f"sample {index} of {type(samples).__name__} is of type {type(found).__name__}: "
        f"return mural.data.Sample(name, image, target), or a pair (image, target)"
    )


def name_at(samples: Samples, index: int) -> str:
    """The name of a sample where the dataset says it without making the sample, else ""."""
    name = getattr(samples, "name", None)
    return str(name(index)) if callable(name) else ""


def is_path(value: Any) -> bool:
    """Whether a sample's part names a file."""
    return isinstance(value, str | PathLike)


def opened(value: Any, name: str, opener: Opener, spatial: int = 2) -> Source:
    """The source of a sample's image or mask; `opener` opens paths. An array of `spatial` dims is one channel."""
    if isinstance(value, Source):
        return value
    if is_path(value):
        return opener(str(value))
    if isinstance(value, Tensor | np.ndarray):
        return ArraySource(value[None] if value.ndim == spatial else value, name)
    raise UnfitData(
        f"{name}: {type(value).__name__} is not a path, a Source, an array or a tensor: "
        f"pass one of these as an image or a mask",
        name,
    )


def label_of(target: Any) -> Tensor | None:
    """The label of a sample as a tensor () or (K,), whole numbers as int64; None where the target is not a label."""
    if isinstance(target, np.generic | np.ndarray) and target.ndim < 2:
        target = torch.from_numpy(np.array(target))
    if isinstance(target, Tensor) and target.ndim < 2:
        return target.detach().cpu() if target.is_floating_point() else target.detach().cpu().long()
    if isinstance(target, Integral):
        return torch.tensor(int(target))
    if isinstance(target, Real):
        return torch.tensor(float(target), dtype=torch.float64)
    return None
