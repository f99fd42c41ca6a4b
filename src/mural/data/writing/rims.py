"""Rims: units of which a process has written a part so far, kept until the rest comes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mural.data.formats.dtypes import Array
from mural.geometry import Box, overlap, slices, subtract, volume
from mural.geometry.tile_grid import Index

IN_MEMORY = 256 * 2**20
"""Bytes of rims that are kept in memory; more go to a folder next to the output."""


@dataclass
class Rim:
    """A unit in parts: its pixels so far, and the boxes that are still to come."""

    box: Box
    pixels: Array
    missing: tuple[Box, ...]

    def paste(self, part: Box, pixels: Array) -> None:
        """Add the pixels of a part of the unit."""
        self.pixels[slices(part, self.box)] = pixels
        self.missing = remaining(self.missing, part)

    @property
    def parts(self) -> tuple[Box, ...]:
        """Disjoint boxes that are there."""
        found: tuple[Box, ...] = (self.box,)
        for box in self.missing:
            found = remaining(found, box)
        return found


def remaining(boxes: tuple[Box, ...], part: Box) -> tuple[Box, ...]:
    """What is left of disjoint boxes without a part."""
    left: list[Box] = []
    for box in boxes:
        common = overlap(box, part)
        left += subtract(box, common) if volume(common) else (box,)
    return tuple(left)


class Rims:
    """The rims of a process by their units; beyond a limit the longest kept go to files."""

    def __init__(self, dtype: np.dtype[Any], folder: Path, prefix: str, limit: int = IN_MEMORY) -> None:
        self.dtype, self.limit = dtype, limit
        self._folder, self._prefix = folder, prefix
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._kept: dict[Index, Rim] = {}
        self._stored: dict[Index, tuple[Path, Box, tuple[Box, ...]]] = {}
        self._serial = 0

    def __contains__(self, index: Index) -> bool:
        return index in self._kept or index in self._stored

    def __iter__(self) -> Any:
        return iter(sorted({*self._kept, *self._stored}))

    def take(self, index: Index, box: Box) -> Rim:
        """The rim of a unit, which is a new one where there was none; it is no longer kept."""
        if index in self._kept:
            return self._kept.pop(index)
        if index in self._stored:
            path, place, missing = self._stored.pop(index)
            pixels = np.load(path, allow_pickle=False)
            path.unlink()
            return Rim(place, pixels, missing)
        return Rim(box, np.zeros([interval.size for interval in box], self.dtype), (box,))

    def keep(self, index: Index, rim: Rim) -> None:
        """Keep a rim, in memory or in a file."""
        self._kept[index] = rim
        while len(self._kept) > 1 and sum(r.pixels.nbytes for r in self._kept.values()) > self.limit:
            self._store(next(iter(self._kept)))

    def drop(self, index: Index) -> None:
        """Forget a rim."""
        self._kept.pop(index, None)
        path, *_ = self._stored.pop(index, (None,))
        if path is not None:
            path.unlink()

    def _store(self, index: Index) -> None:
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix=self._prefix, suffix=".partial", dir=self._folder)
        rim = self._kept.pop(index)
        self._serial += 1
        path = Path(self._scratch.name) / f"{self._serial}.npy"
        np.save(path, rim.pixels, allow_pickle=False)
        self._stored[index] = (path, rim.box, rim.missing)

    def missing(self, index: Index, box: Box) -> tuple[Box, ...]:
        """What is to come of a unit."""
        if index in self._kept:
            return self._kept[index].missing
        return self._stored[index][2] if index in self._stored else (box,)

    def close(self) -> None:
        """Release all rims."""
        self._kept.clear()
        self._stored.clear()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
