"""Sinks: what results are written to, box by box."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mural.errors import LayoutError
from mural.geometry import Interval, slices


@runtime_checkable
class Sink(Protocol):
    """An image that is written in boxes: `mural.data.create(…)`, or anything with a shape (channels first) and `write`.

    Boxes come in any order, and those of a pass are disjoint. Finishing is for whoever made the sink.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) or (C, D, H, W)."""
        ...

    def write(self, box: Any, tensor: Tensor) -> None:
        """Write that box, one (start, stop) pair per dim, from a tensor of its shape on any device."""
        ...


class TensorSink:
    """A tensor that is written in boxes; `torch.from_numpy(numpy.memmap(…))` is one on disk.

    >>> sink = TensorSink(torch.zeros(1, 2, 3))
    >>> sink.write([(0, 1), (1, 2), (0, 2)], torch.ones(1, 1, 2))
    >>> sink.tensor.tolist()
    [[[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]]
    """

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        return self.tensor.dtype

    def write(self, box: Any, tensor: Tensor) -> None:
        """Write that box; the type has to be the sink's, as it is of a file."""
        place = tuple(Interval(int(start), int(stop)) for start, stop in box)
        inside = len(place) == len(self.shape) and all(
            0 <= i.start <= i.stop <= n for i, n in zip(place, self.shape, strict=True)
        )
        if not inside or tuple(tensor.shape) != tuple(i.size for i in place) or tensor.dtype != self.dtype:
            raise LayoutError(
                f"a tensor {tuple(tensor.shape)} of {tensor.dtype} for the box {[tuple(i) for i in place]} of a sink "
                f"{self.shape} of {self.dtype}: a box is within the sink; a tensor has its shape and the sink's type"
            )
        self.tensor[slices(place)].copy_(tensor.detach())
