"""Which images of a batch a micro-batch has."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """The images from `start` to `stop` - 1 of a batch of `total`."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """How many images these are."""
        return self.stop - self.start


_rows: list[Rows | None] = [None]
"""One for all threads: a checkpoint may recompute its region in a thread of the autograd engine."""


@contextmanager
def rows_of_batch(rows: Rows | None) -> Generator[None]:
    """In this block, tensors hold these images of a larger batch."""
    _rows.append(rows)
    try:
        yield
    finally:
        _rows.pop()


def current_rows() -> Rows | None:
    """The images that tensors hold now."""
    return _rows[-1]
