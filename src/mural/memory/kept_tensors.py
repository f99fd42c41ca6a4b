"""Kept tensors: values between passes, and their gradients, for the positions that this rank reads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mural.comm.exchange import empty_like, order_of
from mural.geometry import Box, slices


class KeptTensor:
    """A value that passes write by tiles and read by windows, and its gradient, which windows add to.

    `box` is what this rank holds of it, for every dim. Memory is taken at the first write. The values go when the
    backward of all `readers` has ended: the pass that made them computes them again.
    """

    def __init__(self, box: Box, readers: int = 0):
        self.box, self.readers = box, readers
        self.values: Tensor | None = None
        self.grads: Tensor | None = None
        self.scale: Tensor | None = None

    def plan(self, boxes: Sequence[Box]) -> None:
        """Learn which windows are read next, in order."""

    def write(self, box: Box, tile: Tensor) -> None:
        """Write a tile."""
        if self.values is None:
            self.values = empty_like(tile, [i.size for i in self.box])
        self.values[slices(box, self.box)].copy_(tile, non_blocking=True)

    def read(self, box: Box) -> Tensor:
        """A window."""
        if self.values is None:
            raise RuntimeError("a kept value is read before it was written")
        return compact(self.values[slices(box, self.box)], self.values)

    def copied(self, box: Box) -> Tensor:
        """A window that stays as it is."""
        return self.read(box)

    def add_gradient(self, box: Box, grad: Tensor) -> None:
        """Add the gradient of a window."""
        if self.grads is None:
            self.grads = empty_like(grad, [i.size for i in self.box]).zero_()
        self.grads[slices(box, self.box)] += grad if self.scale is None else grad / self.scale

    def gradient(self, box: Box) -> Tensor | None:
        """The gradient of a tile; None if nothing has one."""
        if self.grads is None:
            return None
        found = compact(self.grads[slices(box, self.box)], self.grads)
        return found if self.scale is None else found * self.scale

    def rescale(self, factor: Tensor) -> None:
        """Scale the gradient, once, as it is read; a factor of 0 forgets it."""
        if bool(factor):
            self.scale = factor
        else:
            self.grads = None

    def end_pass(self) -> None:
        """All windows of a pass were added."""
        self.readers -= 1
        if not self.readers:
            self.values = None

    def drop(self) -> None:
        """Give all memory back."""
        self.values = self.grads = None


def compact(part: Tensor, whole: Tensor) -> Tensor:
    """A part of a tensor without gaps, as whole rows are: what reads it would otherwise copy it, each time."""
    return part if part.is_contiguous(memory_format=order_of(whole)) else empty_like(whole, part.shape).copy_(part)
