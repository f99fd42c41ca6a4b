"""What a reader gives for a file, arrays in the file's own dims of which boxes can be read, and a source of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mural import geometry
from mural.data.formats.axes import Axes
from mural.data.formats.dtypes import Array, to_tensor, torch_dtype
from mural.data.source import Box, Counter, Level, Source, checked_box, level_of, pairs
from mural.errors import DataError, reading_hint


@dataclass(frozen=True)
class Options:
    """How to open a file; `mural.data.open` says what each means."""

    axes: str | None = None
    threads: int = 4
    reader: str | None = None
    series: int = 0
    key: str | None = None
    whole: bool = False


class Stored(Protocol):
    """One level of an image as the file holds it: dims in the file's order, divided into chunks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents in the file's order of dims."""
        ...

    @property
    def chunks(self) -> tuple[int, ...]:
        """What is decoded at a time."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the pixels, in native order of bytes."""
        ...

    def read_into(self, out: Array, box: geometry.Box, counter: Counter) -> None:
        """Fill an array, of any strides, with the pixels of a box that is not empty, and count what that decodes."""
        ...


def nothing() -> None:
    """Nothing to release."""


@dataclass(frozen=True)
class OpenedFile:
    """An opened file: its levels, the full one first, what their dims are, and how to release it."""

    levels: Sequence[Stored]
    axes: Axes
    close: Callable[[], None] = field(default=nothing)


Reader = Callable[[Path, Options], OpenedFile]


class FileSource(Source):
    """A source over a file, whose pixels a reader gives; it is pickled as its path and options, and opened again."""

    def __init__(self, path: Path, options: Options, reader: Reader) -> None:
        self.path, self.options, self.name = path, options, str(path)
        self._reader = reader
        self._held = held = reader(path, options)
        first, axes = held.levels[0], held.axes
        self.shape = axes.shape(first.shape)
        self.chunks = axes.chunks(first.shape, first.chunks)
        self.counter = Counter()
        shapes = [axes.shape(stored.shape) for stored in held.levels]
        self.levels = tuple(Level(s, tuple(a / b for a, b in zip(self.shape, s, strict=True))) for s in shapes)
        found = torch_dtype(first.dtype)
        if found is None:
            held.close()
            raise DataError(
                f"{self.name}: pixels of type {first.dtype} have no type in torch: write the file in one that has, "
                "such as uint8, uint16 or float32",
                self.name,
            )
        self.dtype = found
        self.close_at_end = weakref.finalize(self, held.close)

    def read(self, box: Box | None = None, level: int = 0) -> torch.Tensor:
        """The pixels of a box of that level, channels first; without a box, of all of the level."""
        checked = checked_box(self.name, box, level_of(self, level).shape)
        stored, axes = self._held.levels[level], self._held.axes
        try:
            out = np.empty([interval.size for interval in checked], stored.dtype)
            for channels, window in axes.windows(checked, stored.shape) if out.size else ():
                part = axes.as_stored(out[slice(*channels)], window)
                stored.read_into(part, window, self.counter)
        except Exception as error:  # whatever a decoder raises: the user needs file and box in any case
            raise self._unreadable(checked, level, error) from error
        self.counter.add(reads=1)
        return to_tensor(out)

    def _unreadable(self, box: Box, level: int, error: Exception) -> DataError:
        at = f"box {pairs(box)}" + (f" of level {level}" if level else "")
        if isinstance(error, MemoryError):
            return DataError(f"{self.name}: {at} does not fit in memory: read smaller boxes", self.name, pairs(box))
        what = str(error).rstrip(".") or type(error).__name__
        damaged = "the file is damaged there, or changed since it was opened: copy or write it again, or leave it out"
        hint = reading_hint(error, damaged)
        text = f"{self.name}: {at} cannot be read: {what}{hint and f'. {hint[0].upper()}{hint[1:]}'}"
        return DataError(text, self.name, pairs(box))

    def close(self) -> None:
        """Release files; a later `read` opens them again."""
        self._held.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileSource, (self.path, self.options, self._reader)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.shape}, {self.dtype}, {len(self.levels)} levels>"
