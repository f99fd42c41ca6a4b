"""Readable: what windows of an image are read from."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Readable(Protocol):
    """An image that can be read in boxes: `mural.open(…)`, or anything with a shape (channels first) and `read`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) or (C, D, H, W)."""
        ...

    def read(self, box: Any) -> Tensor:
        """That box, one (start, stop) pair per dim."""
        ...


@runtime_checkable
class Converted(Protocol):
    """A source that converts what is stored: windows may travel as they are stored, and be converted on a device."""

    @property
    def stored(self) -> Readable:
        """What is stored."""
        ...

    def values_of(self, raw: Tensor) -> Tensor:
        """What is read for pixels (C, …) that are stored, of all channels."""
        ...

    def same_values(self, other: object) -> bool:
        """Whether another source is converted in the same way."""
        ...
