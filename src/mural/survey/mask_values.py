"""The values in masks and how often each occurs: of all positions where there are few, else of a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mural.data.open import open as open_source
from mural.errors import DataError
from mural.survey.sampled_boxes import AT_ONCE, Progress, boxes, spread, told

MOST = 2**28
"""Positions that are looked at in all masks together."""
MOST_MASKS, LEAST_IN_MASK = 2**12, 2**16
"""Masks that are looked at, and positions of each, where all have more than `MOST`."""
MOST_VALUES = 4096
"""With more values, a mask does not hold classes, and counting ends."""
COUNTED = 2**16
"""The widest range of whole numbers that is counted in a table."""


@dataclass(frozen=True)
class MaskValues:
    """How often each value occurs in some masks; `sampled` if not all positions of all masks were looked at."""

    counts: Counter[float]
    dtypes: tuple[torch.dtype, ...] = (torch.uint8,)
    sampled: bool = False

    @property
    def positions(self) -> int:
        """How many positions were looked at."""
        return self.counts.total()

    @property
    def values(self) -> list[float]:
        """The values, ascending."""
        return sorted(self.counts)

    @property
    def fractions(self) -> bool:
        """Whether some are no whole numbers."""
        return any(not value.is_integer() for value in self.counts)


def values_in(masks: Sequence[Path], sizes: Sequence[int], progress: Progress) -> tuple[MaskValues, dict[Path, str]]:
    """The values of some masks with so many positions each, and why some masks cannot be read."""
    chosen, most = list(masks), MOST
    if sum(sizes) > MOST:
        chosen = spread(masks, MOST_MASKS)
        most = max(LEAST_IN_MASK, MOST // len(chosen))
    counts: Counter[float] = Counter()
    dtypes: dict[torch.dtype, None] = {}
    bad: dict[Path, str] = {}
    sampled = len(chosen) < len(masks)
    for path, found in zip(chosen, told("masks", lambda path: values_of(path, most), chosen, progress), strict=True):
        if isinstance(found, str):
            bad[path] = found
            continue
        counts.update(found.counts)
        dtypes |= dict.fromkeys(found.dtypes)
        sampled = sampled or found.sampled
    return MaskValues(counts, tuple(dtypes), sampled), bad


def values_of(path: Path, most: int) -> MaskValues | str:
    """The values of a mask, of which about so many positions are looked at; or why it cannot be read."""
    counts: Counter[float] = Counter()
    try:
        with open_source(path, threads=1) as source:
            chosen, complete = boxes(source, most)
            for box in chosen:
                for part in source.read(box).flatten().split(AT_ONCE):
                    counts.update(counted(part))
                if len(counts) > MOST_VALUES:
                    complete = False
                    break
            return MaskValues(counts, (source.dtype,), not complete)
    except DataError as error:
        return str(error)


def counted(values: Tensor) -> dict[float, int]:
    """How often each value occurs.

    >>> counted(torch.tensor([0, 255, 255], dtype=torch.uint8))
    {0.0: 1, 255.0: 2}
    """
    array = (values.to(torch.uint8) if values.dtype == torch.bool else values).numpy()
    if array.dtype.kind in "iu":
        low, high = int(array.min()), int(array.max())
        if high - low < COUNTED:
            table = np.bincount(array.astype(np.int64) - low)
            return {float(low + int(place)): int(table[place]) for place in table.nonzero()[0]}
    found, often = np.unique(array, return_counts=True)
    return {float(value): int(count) for value, count in zip(found, often, strict=True)}
