"""Files without windows: decoded whole when first read, the latest few kept in memory up to a limit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from mural.data.formats.dtypes import Array
from mural.data.source import Counter
from mural.errors import DataError
from mural.geometry import Box, slices

LIMIT = 512 * 2**20
"""Bytes of one decoded file that are not refused, and bytes of all that are kept at once."""


class Recent:
    """Decoded files; the least recently used are dropped first when they exceed the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Array] = OrderedDict()

    def get(self, key: int) -> Array | None:
        """What is kept under a key."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: int, array: Array) -> None:
        """Keep an array, whatever its size, and release others."""
        with self._lock:
            self._kept[key] = array
            while len(self._kept) > 1 and sum(a.nbytes for a in self._kept.values()) > self.limit:
                self._kept.popitem(last=False)

    def drop(self, key: int) -> None:
        """Release an array."""
        with self._lock:
            self._kept.pop(key, None)


_recent = Recent(LIMIT)


class WholeArray:
    """An array that `load` decodes as a whole."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], load: Callable[[], Array], unlimited: bool
    ) -> None:
        self.name, self.shape, self.chunks, self.load = name, shape, shape, load
        self.dtype = dtype.newbyteorder("=")
        self._lock = threading.Lock()
        size = prod(shape) * dtype.itemsize
        if size > LIMIT and not unlimited:
            raise DataError(
                f"{name}: {size / 2**20:.0f} MiB of pixels that can only be decoded all at once, which is refused "
                f"above {LIMIT // 2**20} MiB: run `mural convert {name} OUT.ome.zarr` once and read that in windows, "
                "or pass whole=True to hold all of it in memory",
                name,
            )

    def read_into(self, out: Array, box: Box, counter: Counter) -> None:
        """Fill an array with the pixels of a box of the decoded file."""
        out[...] = self._decoded(counter)[slices(box)]

    def _decoded(self, counter: Counter) -> Array:
        with self._lock:
            found = _recent.get(id(self))
            if found is None:
                found = self.load()
                if found.shape != self.shape:
                    raise ValueError(f"it holds {found.shape}, but said {self.shape} when it was opened")
                counter.add(tiles=1, bytes_=found.nbytes)
                _recent.put(id(self), found)
            return found

    def close(self) -> None:
        """Release the pixels."""
        _recent.drop(id(self))
