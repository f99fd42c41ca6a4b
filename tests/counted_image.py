"""A source that counts its reads, windows of it, and the threads that read them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mural.geometry import Box, Interval


class CountedImage:
    """A source that counts its reads, and may say its type and tiles, wait, or raise at a position."""

    def __init__(
        self, values: Tensor, chunks: Sequence[int] | None = None, says_dtype: bool = True, seconds: float = 0
    ):
        self.name, self.values, self.shape, self.seconds = "counted.tif", values, tuple(values.shape), seconds
        if says_dtype:
            self.dtype = values.dtype
        if chunks is not None:
            self.chunks = (values.shape[0], *chunks)
        self.boxes: list[tuple[tuple[int, int], ...]] = []
        self.bad: tuple[int, ...] | None = None
        self.meeting: threading.Barrier | None = None
        self.lock = threading.Lock()

    def read(self, box: Any) -> Tensor:
        with self.lock:
            self.boxes.append(tuple((a, b) for a, b in box))
        time.sleep(self.seconds)
        if self.meeting is not None:
            self.meeting.wait(60)
        if self.bad is not None and all(a <= at < b for at, (a, b) in zip(self.bad, box[1:], strict=True)):
            raise OSError("a damaged tile")
        return self.values[tuple(slice(a, b) for a, b in box)]


def image(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(0, 200, tuple(shape), generator=torch.Generator().manual_seed(7)).to(dtype)


def box(*pairs: tuple[int, int]) -> Box:
    return tuple(Interval(*pair) for pair in pairs)


def grid_windows(extents: Sequence[int], side: int, halo: int) -> list[tuple[int, Box]]:
    """Tiles with a halo, over the whole of image 0, in rows."""
    rows, columns = ([(max(0, a - halo), min(n, a + side + halo)) for a in range(0, n, side)] for n in extents)
    return [(0, box(row, column)) for row in rows for column in columns]


def threads_of_readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mural-reader")]
