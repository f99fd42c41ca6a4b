"""Unread tensors: parts of a batch that this rank's stages do not use, known only by shape and type."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mural.shard.tensor import ShardedTensor


class Unread:
    """A sharded tensor whose piece this rank has not read; `tensor()` reads it, once.

    It has no method `read`, so that it is not taken for a source, whose shape is that of one image.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, reading: Callable[[], ShardedTensor]):
        self.shape, self.dtype, self._reading = torch.Size(shape), dtype, reading
        self._found: ShardedTensor | None = None

    def tensor(self) -> ShardedTensor:
        """The tensor with this rank's piece, which is read now if it has not been before."""
        if self._found is None:
            self._found = self._reading()
        return self._found

    def full(self) -> Tensor:
        """The whole tensor as a plain one, as with a sharded tensor: read now, and collective over its ranks."""
        return self.tensor().full()

    def then(self, change: Callable[[ShardedTensor], ShardedTensor], shape: Sequence[int] | None = None) -> Unread:
        """The result of `change` on the tensor, still unread; `shape` if it has another one."""
        return Unread(self.shape if shape is None else shape, self.dtype, lambda: change(self.tensor()))

    def __repr__(self) -> str:
        return f"Unread({tuple(self.shape)}, {self.dtype})"
