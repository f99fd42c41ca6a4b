"""A source: an image that is read in boxes, each as a tensor with its channels first."""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from mural import geometry
from mural.errors import DataError
from mural.geometry import Interval, whole

Box = Sequence[tuple[int, int]]
"""One (start, stop) per dim, channels first; the boxes of `mural.geometry` are such boxes too."""


@dataclass(frozen=True)
class Level:
    """One resolution of an image: its shape, and how many pixels of level 0 one of its pixels stands for, per dim."""

    shape: tuple[int, ...]
    downsample: tuple[float, ...]


class Counter:
    """What was decoded so far: uncompressed bytes of tiles, tiles, and calls of `read`; threads may count at once.

    >>> counter = Counter()
    >>> counter.add(tiles=2, bytes_=512)
    >>> counter.bytes_decoded, counter.tiles_decoded, counter.reads
    (512, 2, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Start again at zero."""
        with self._lock:
            self.bytes_decoded = self.tiles_decoded = self.reads = 0

    def add(self, *, tiles: int = 0, bytes_: int = 0, reads: int = 0) -> None:
        """Count tiles, the bytes they have when decoded, and reads."""
        with self._lock:
            self.tiles_decoded += tiles
            self.bytes_decoded += bytes_
            self.reads += reads

    def __repr__(self) -> str:
        return f"Counter(bytes_decoded={self.bytes_decoded}, tiles_decoded={self.tiles_decoded}, reads={self.reads})"


class Source(ABC):
    """An image, of which any box can be read; several threads may read at once.

    `name` says in messages which image it is. `shape` is (C, H, W) or (C, D, H, W); a mask has one channel. `dtype` is
    that of what `read` returns. `levels` are the image's resolutions, the full one first. `chunks` is what has to be
    decoded at least to get one pixel of level 0. `counter` counts what was decoded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    levels: tuple[Level, ...]
    chunks: tuple[int, ...]
    counter: Counter

    @abstractmethod
    def read(self, box: Box | None = None, level: int = 0) -> torch.Tensor:
        """The pixels of a box of that level, channels first; without a box, of all of the level."""

    def close(self) -> None:  # noqa: B027 (a source that holds nothing has nothing to close)
        """Release files; a later `read` opens them again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def level_of(source: Source, level: int) -> Level:
    """That level of a source, or an error that says which there are."""
    if not 0 <= level < len(source.levels):
        raise DataError(
            f"{source.name}: level {level} was asked for, but the levels are 0 to {len(source.levels) - 1}", source.name
        )
    return source.levels[level]


def checked_box(name: str, box: Box | None, shape: Sequence[int]) -> geometry.Box:
    """The box as intervals (None: all of the shape), or an error unless it is within the shape.

    >>> checked_box("x.tif", [(0, 3), (5, 9)], (3, 16))
    (Interval(start=0, stop=3), Interval(start=5, stop=9))
    """
    if box is None:
        return whole(shape)
    try:
        found = tuple(Interval(operator.index(start), operator.index(stop)) for start, stop in box)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}: box {box!r} is not one (start, stop) pair of whole numbers per dim", name, box
        ) from error
    rule = f"a box has one (start, stop) per dim of {tuple(shape)}, with 0 <= start <= stop <= extent"
    if len(found) != len(shape):
        raise DataError(
            f"{name}: box {pairs(found)} has {len(found)} dims, but the shape has {len(shape)}: {rule}", name, box
        )
    if any(not 0 <= i.start <= i.stop <= extent for i, extent in zip(found, shape, strict=True)):
        raise DataError(f"{name}: box {pairs(found)} is not within the shape {tuple(shape)}: {rule}", name, box)
    return found


def pairs(box: Box) -> tuple[tuple[int, int], ...]:
    """The box as plain pairs, for messages.

    >>> pairs((Interval(0, 3), Interval(5, 9)))
    ((0, 3), (5, 9))
    """
    return tuple((int(start), int(stop)) for start, stop in box)
