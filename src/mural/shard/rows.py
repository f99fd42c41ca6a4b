"""Which images of a batch a micro-batch has, so that random layers draw for it what they would for the whole batch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
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


def in_batch(shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The shape that a tensor of the micro-batch has in the whole batch, and where it begins in dim 0 of that.

    A dim 0 that merges the images with others, as windows do, grows with them. A tensor whose dim 0 is no multiple of
    the images is not of the batch.

    >>> with rows_of_batch(Rows(2, 4, 6)):
    ...     in_batch((2, 8)), in_batch((10, 8)), in_batch((3, 8))
    (((6, 8), 2), ((30, 8), 10), ((3, 8), 0))
    """
    rows, shape = _rows[-1], tuple(shape)
    if rows is None or not shape or not rows.count or shape[0] % rows.count:
        return shape, 0
    each = shape[0] // rows.count
    return (rows.total * each, *shape[1:]), rows.start * each
