"""What opening a TIFF with tifffile needs: whether the file is complete, and no log lines on the terminal."""

from __future__ import annotations

import logging
import struct
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import ArrayLike

from mural.errors import DataError


def truncated(name: str, what: str, size: int) -> DataError:
    """The error of a file that ends too early."""
    return DataError(f"{name}: {what}, but the file has {size} bytes: it is truncated; copy or write it again", name)


def check_directories(path: Path, file: tifffile.TiffFile) -> None:
    """Raise where the chain of directories leads out of the file: tifffile would leave out the pages after it.

    header -> directory 0 -> directory 1 -> … -> 0
    """
    form, size = file.tiff, path.stat().st_size
    if form.is_ndpi:  # its offsets are 64 bits wide in a header that says 32
        return
    with path.open("rb") as raw:
        raw.seek(4 if form.offsetsize == 4 else 8)
        seen: set[int] = set()
        while True:
            (offset,) = struct.unpack(form.offsetformat, raw.read(form.offsetsize))
            if offset == 0 or offset in seen:
                return
            seen.add(offset)
            raw.seek(offset)
            head = raw.read(form.tagnosize)
            tags = struct.unpack(form.tagnoformat, head)[0] if len(head) == form.tagnosize else 0
            end = offset + form.tagnosize + tags * form.tagsize
            if len(head) < form.tagnosize or end + form.offsetsize > size:
                raise truncated(str(path), f"directory {len(seen) - 1} begins at byte {offset}", size)
            raw.seek(end)


def check_segments(name: str, path: Path, offsets: ArrayLike, counts: ArrayLike) -> None:
    """Raise where a tile or strip reaches beyond the end of its file."""
    size = path.stat().st_size
    ends = np.asarray(offsets, np.uint64) + np.asarray(counts, np.uint64)
    if len(ends) and int(ends.max()) > size:
        late = int((ends > size).sum())
        raise truncated(name, f"{late} of {len(ends)} tiles or strips reach up to byte {int(ends.max())}", size)


LOGGER = logging.getLogger("tifffile")
OPENING: ContextVar[bool] = ContextVar("OPENING", default=False)
"""Whether mural is opening a file, in this thread: another thread may use tifffile for itself meanwhile."""


def heard(_: logging.LogRecord) -> bool:
    """Whether a line goes on: to handlers always, but to the terminal, where logging puts the rest, not while we open.

    What is wrong with a file is in the error that opening it raises, so the lines would say it a second time.
    """
    return not OPENING.get() or LOGGER.hasHandlers()


LOGGER.addFilter(heard)


@contextmanager
def quiet() -> Generator[None]:
    """A block that opens a file with tifffile."""
    token = OPENING.set(True)
    try:
        yield
    finally:
        OPENING.reset(token)
