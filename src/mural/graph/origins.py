"""Where tensors come from: which call made each of them, and which calls have written to its memory since.

y = conv(x)        0   y ← 0
v = y[:, :1]       1   v ← 1, in the same memory
v.relu_()          2   v ← 2, and 2 has written to that memory
z = y + 1          3   reads y ← 0, after 2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mural.graph.nodes import Source


@dataclass(frozen=True)
class Origin:
    """The origin of one tensor; holding the tensor keeps its `id` from being given to another."""

    tensor: Tensor
    source: Source
    pick: int

    @property
    def time(self) -> int:
        """The id of the node, -1 for what was there before all nodes."""
        return self.source if isinstance(self.source, int) else -1


@dataclass(frozen=True)
class Read:
    """What a call that reads a tensor waits for."""

    source: Source
    pick: int
    after: tuple[int, ...]


def memory_of(tensor: Tensor) -> int:
    """A number that tensors which share memory have in common, on meta too."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse: no single storage
        return id(tensor)


def bytes_of(tensor: Tensor) -> int:
    """The size of a tensor's memory: all of it, where the tensor is a view of a part."""
    try:
        return tensor.untyped_storage().nbytes()
    except NotImplementedError:  # sparse: no single storage
        return tensor.numel() * tensor.element_size()


def state_of(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to, or put into other memory."""
    return tensor._version, memory_of(tensor)


class Origins:
    """The origins of all tensors that a model has met so far."""

    def __init__(self) -> None:
        self._of: dict[int, Origin] = {}
        self._sharing: dict[int, list[Origin]] = {}
        self._writes: dict[int, list[int]] = {}

    def enter(self, tensor: Tensor, source: Source, pick: int = 0) -> None:
        """Note that a tensor, or its next version, comes from there."""
        origin = Origin(tensor, source, pick)
        self._of[id(tensor)] = origin
        self._sharing.setdefault(memory_of(tensor), []).append(origin)

    def write(self, tensor: Tensor, node: int) -> None:
        """Note that a node has written to the memory of a tensor."""
        self._writes.setdefault(memory_of(tensor), []).append(node)

    def read(self, tensor: Tensor) -> Read | None:
        """What a reader of this tensor waits for; None if neither it nor another tensor in its memory was entered."""
        origin = self._of.get(id(tensor)) or self._alias(tensor)
        if origin is None:
            return None
        writes = self._writes.get(memory_of(tensor), [])
        return Read(origin.source, origin.pick, tuple(node for node in writes if node > origin.time))

    def owners(self, tensor: Tensor) -> tuple[Source, ...]:
        """The sources of the tensors that share its memory, the oldest first."""
        return tuple(dict.fromkeys(origin.source for origin in self._sharing.get(memory_of(tensor), ())))

    def _alias(self, tensor: Tensor) -> Origin | None:
        """The newest tensor in the same memory, at the same place if there is one.

        autograd hands out new objects for old tensors without a call that could be seen: around a custom
        Function that returns its input, and around modules with backward hooks.
        """
        sharing = self._sharing.get(memory_of(tensor), [])
        same = [origin for origin in sharing if _place(origin.tensor) == _place(tensor)]
        return (same or sharing or [None])[-1]


def _place(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())
