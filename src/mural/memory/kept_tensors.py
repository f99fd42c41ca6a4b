"""Kept tensors: values between passes, and their gradients, for the positions that this rank reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mural.geometry import Box, slices
from mural.memory.tile_calls import Axes


class KeptTensor:
    """A value that passes write by tiles and read by windows, and its gradient, which windows add to.

    `box` is what this rank holds of it, for every dim. Memory is taken at the first write. The values go when the
    backward of all `readers` has ended: the pass that made them computes them again.
    """

    def __init__(self, box: Box, axes: Axes, device: torch.device, readers: int = 0):
        self.box, self.axes, self.device, self.readers = box, axes, device, readers
        self.values: Tensor | None = None
        self.grads: Tensor | None = None
        self.scale: Tensor | None = None

    def plan(self, boxes: Sequence[Box]) -> None:
        """Learn which windows are read next, in order."""

    def write(self, box: Box, tile: Tensor) -> None:
        """Write a tile."""
        if self.values is None:
            self.values = empty_as(tile, [i.size for i in self.box], self.device)
        self.values[slices(box, self.box)].copy_(tile, non_blocking=True)

    def read(self, box: Box) -> Tensor:
        """A window."""
        if self.values is None:
            raise RuntimeError("a kept value is read before it was written")
        return compact(self.values[slices(box, self.box)], self.values)

    def add_gradient(self, box: Box, grad: Tensor) -> None:
        """Add the gradient of a window."""
        if self.grads is None:
            self.grads = empty_as(grad, [i.size for i in self.box], self.device).zero_()
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

    def plan_gradient(self, boxes: Sequence[Box]) -> None:
        """Learn which tiles' gradients are read next, in order."""

    def end_pass(self) -> None:
        """All windows of a pass were added."""
        self.readers -= 1
        if not self.readers:
            self.values = None

    def drop(self) -> None:
        """Give all memory back."""
        self.values = self.grads = None


def compact(part: Tensor, whole: Tensor) -> Tensor:
    """A part of a tensor without gaps: what reads it would otherwise copy it, each time."""
    return part if part.shape == whole.shape else empty_as(whole, part.shape, whole.device).copy_(part)


def empty_as(like: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Memory for values like these, in their memory format."""
    channels_last = like.ndim in (4, 5) and not like.is_contiguous() and like.stride(1) == 1
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    form = formats[like.ndim] if channels_last else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=like.dtype, device=device, memory_format=form)
