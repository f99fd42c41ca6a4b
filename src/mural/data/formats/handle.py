"""A file that several threads read at once, each at its own place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path


class Handle:
    """The bytes of a file: opened by the first read, and again by a read after `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file: int | None = None
        self._users = 0
        self._closing = False

    def read(self, offset: int, count: int) -> bytes:
        """That many bytes from an offset on."""
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), count, (offset,))
        return bytes(buffer)

    def read_into(self, buffer: memoryview, length: int, offsets: Iterable[int]) -> None:
        """Fill a buffer with stretches of that many bytes from these offsets on; raise where the file ends before."""
        file, at = self._begin(), 0
        try:
            for offset in offsets:
                if os.preadv(file, [buffer[at : at + length]], offset) != length:
                    fill(file, buffer[at : at + length], offset)
                at += length
        finally:
            self._end()

    def _begin(self) -> int:
        with self._lock:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self._users += 1
            return self._file

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._closing and not self._users:
                self._shut()

    def close(self) -> None:
        """Close the file once nobody reads."""
        with self._lock:
            self._closing = self._users > 0
            if not self._closing:
                self._shut()

    def _shut(self) -> None:
        self._closing = False
        if self._file is not None:
            os.close(self._file)
            self._file = None


def fill(file: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer by as many reads as it takes: one is at most about 2 GiB, and may be interrupted."""
    done = 0
    while done < len(buffer):
        got = os.preadv(file, [buffer[done : done + 2**30]], offset + done)
        if not got:
            size = os.fstat(file).st_size
            raise EOFError(f"bytes {offset} to {offset + len(buffer)} are wanted, but the file has {size}")
        done += got
