"""Buckets: gradients concatenated in flat buffers, each of which travels as one message.

    | weight, 16 rows … | bias … |   | 1 1 |        a bucket of two parameters
      slot 0              slot 1       tail

The tail says, for each slot, whether this rank has a gradient for it that is not averaged yet. After the exchange it
says whether any rank had one, so nothing else has to be exchanged for parameters that some ranks did not reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.gradients.bucket_sums import Sum
from mural.gradients.replicas import REPLICAS

ALIGN = 16
"""Slots begin at multiples of this many values, so that kernels can load whole vectors."""
SMALL_BYTES = 2**20
"""The first bucket leaves early, while there is still much to compute; no computation overlaps with the last one."""
SIGNALS = 2
"""The last bucket's tail ends with two more numbers: ranks that raised, and ranks with gradients that came late."""


def mark_reduced(grad: Tensor, axes: Sequence[str] = REPLICAS) -> None:
    """Mark a gradient as the mean over those axes; whatever is added to it later changes its version."""
    grad._mural_reduced = (grad._version, frozenset(axes))  # type: ignore[attr-defined]


def is_reduced(grad: Tensor | None, axes: Sequence[str] = REPLICAS) -> bool:
    """Whether this gradient was reduced over at least those axes and nothing was added since."""
    version, reduced = getattr(grad, "_mural_reduced", (None, frozenset[str]()))
    return grad is not None and version == grad._version and reduced.issuperset(axes)


@dataclass(frozen=True)
class BucketMember:
    """A parameter, with what decides where its gradient goes."""

    name: str
    parameter: Tensor = field(repr=False)
    kind: tuple[torch.dtype, torch.device]
    """What gradients that share a buffer have in common."""
    strides: tuple[int, ...]
    """The strides of the parameter if it is dense."""

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> BucketMember:
        """The member of that name."""
        strides = torch.empty_like(parameter, device="meta").stride()
        return cls(name, parameter, kind_of(parameter), strides)

    @property
    def room(self) -> int:
        """How many values its slot has."""
        return -(-self.parameter.numel() // ALIGN) * ALIGN

    @property
    def bytes(self) -> int:
        """The size of its slot."""
        return self.room * self.kind[0].itemsize


def kind_of(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    """The type and the device of a parameter's gradients."""
    chosen = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return chosen or parameter.dtype, parameter.device


def arrange(sizes: Sequence[tuple[int, Any]], order: Sequence[int], limit: int) -> list[list[int]]:
    """Indices in buckets of at most that many bytes and one kind; buckets come in the order of their last members.

    The first and the last buckets are small.

    >>> arrange([(4, "f"), (4, "f"), (4, "h"), (4, "f")], order=[3, 2, 1, 0], limit=8)
    [[3], [2], [1, 0]]
    """
    small = min(limit, SMALL_BYTES)
    rest, size = len(order), 0
    while rest and (size == 0 or size + sizes[order[rest - 1]][0] <= small):
        rest -= 1
        size += sizes[order[rest]][0]
    found = [*packed(sizes, order[:rest], small, limit), *packed(sizes, order[rest:], limit, limit)]
    position = {index: at for at, index in enumerate(order)}
    return sorted(found, key=lambda members: position[members[-1]])


def packed(sizes: Sequence[tuple[int, Any]], order: Sequence[int], first: int, limit: int) -> list[list[int]]:
    """Indices in order, in buckets of one kind; the bucket that fills up first has a separate limit."""
    full: list[list[int]] = []
    filling: dict[Any, tuple[int, list[int]]] = {}
    for index in order:
        size, kind = sizes[index]
        held, members = filling.get(kind, (0, []))
        if members and held + size > (limit if full else first):
            full.append(members)
            held, members = 0, []
        filling[kind] = (held + size, [*members, index])
    return [*full, *(members for _, members in filling.values())]


def in_buckets(tensors: Iterable[Tensor], limit: int = 32 * 2**20) -> list[list[Tensor]]:
    """Tensors in lists of limited size, each of one type and device."""
    found = list(tensors)
    sizes = [(t.numel() * t.element_size(), (t.dtype, t.device)) for t in found]
    return [[found[i] for i in indices] for indices in packed(sizes, range(len(found)), limit, limit)]


class Bucket:
    """Parameters whose gradients travel together, and the buffer that they then share."""

    def __init__(self, members: Sequence[BucketMember], axes: tuple[str, ...], total: Sum):
        self.members, self.parameters = tuple(members), [m.parameter for m in members]
        self.axes, self.total = axes, total
        self.tail = sum(m.room for m in members)
        self.offsets = [sum(m.room for m in members[:slot]) for slot in range(len(members))]
        self.buffer: Tensor | None = None
        self._clear()

    def _clear(self) -> None:
        """Start with nothing filed."""
        self.left = len(self.members)
        self.views: dict[int, Tensor] = {}
        self.flags = [0] * len(self.members)
        self.kept: dict[int, Tensor] = {}
        self.streams: set[torch.cuda.Stream] = set()
        self.work: Any = None

    def begin(self, several: bool) -> None:
        """Prepare for new gradients; a buffer that someone else still uses is left to them.

        Before `several` backwards, a buffer without gradients is freed: until the last one, gradients accumulate
        elsewhere, and need the memory there.
        """
        self._clear()
        if self.buffer is not None:
            grads, shared = self._users(self.buffer)
            if shared or (several and not grads):
                self.buffer = None

    def _users(self, buffer: Tensor) -> tuple[int, bool]:
        """How many of the parameters' gradients are views of the buffer, and whether anything else is.

        A gradient that a user kept from the last step is such a view: a new buffer leaves it unchanged.
        """
        storage = buffer.untyped_storage()
        start = storage.data_ptr()
        inside = range(start, start + storage.nbytes())
        grads = sum(p.grad is not None and p.grad.data_ptr() in inside for p in self.parameters)
        # The buffer's own two references: the attribute, and the one used here.
        return grads, torch._C._storage_Use_Count(storage._cdata) > 2 + grads  # type: ignore[attr-defined]

    def file(self, slot: int, fired: bool) -> None:
        """Move a parameter's gradient, scaled as it counts in the sum, into its slot.

        What backward adds to the parameter after that is a new tensor, separate from what is under way.
        """
        member, buffer = self.members[slot], self._buffer()
        grad = member.parameter.grad
        # `.data` has a version counter of its own: a write to one gradient says nothing about the others.
        view = buffer.as_strided(member.parameter.shape, member.strides, self.offsets[slot]).data
        self.views[slot] = view
        self.left -= 1
        if buffer.is_cuda:
            self.streams.add(torch.cuda.current_stream(buffer.device))
        if grad is None:
            view.zero_()
            return
        if grad.layout != torch.strided:
            raise UnsupportedOp(
                f"the gradient of {member.name} has the layout {grad.layout}: only dense gradients can be averaged; "
                f"make its layer with sparse=False"
            )
        if grad.requires_grad and fired:
            raise UnsupportedOp(
                f"the gradient of {member.name} has a graph (create_graph=True), which its mean over ranks would "
                f"lose: call backward outside of watching()"
            )
        fresh = member.parameter.requires_grad and (fired or not is_reduced(grad, self.axes))
        self.flags[slot] = int(fresh)
        if not fresh:
            self.kept[slot] = grad.clone() if grad.data_ptr() == view.data_ptr() else grad
        with torch.no_grad():
            torch.mul(grad, self.total.scale, out=view)
        member.parameter.grad = None

    def launch(self, signals: tuple[int, int] = (0, 0)) -> None:
        """Start the exchange of what was filed."""
        for stream in self.streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)
        tail = self._buffer()[self.tail :]
        if all(self.flags):
            tail.fill_(1)
            tail[len(self.members) :].zero_()
        if any(signals) or not all(self.flags):
            tail.copy_(torch.tensor([*self.flags, *signals], dtype=tail.dtype))
        self.work = self.total.launch(self._buffer())

    def read_signals(self) -> tuple[bool, bool]:
        """Whether any rank raised, and whether any rank has gradients that came late."""
        raised, late = self._tail()[len(self.members) :]
        return raised > 0, late > 0

    def _tail(self) -> list[float]:
        tail = self._buffer()[self.tail :]
        return (tail.real if tail.is_complex() else tail).tolist()

    def deliver(self) -> None:
        """Write the means to the parameters; those for which no rank had a new gradient keep their old one."""
        every = all(self.flags)  # then the others' flags do not matter, and there is no need to wait for the device
        counts = [1.0] * len(self.members) if every else self._tail()
        for slot, parameter in enumerate(self.parameters):
            if counts[slot] > 0:
                view = self.views[slot]
                parameter.grad = view
                mark_reduced(view, self.axes)
            else:
                parameter.grad = self.kept.get(slot)
        self._clear()

    def drop(self) -> None:
        """Forget everything: the buffer too, which an exchange that failed may still write to."""
        self.buffer = None
        self._clear()

    def _buffer(self) -> Tensor:
        if self.buffer is None:
            dtype, device = self.members[0].kind
            self.buffer = torch.zeros(self.tail + len(self.members) + SIGNALS, dtype=dtype, device=device)
        return self.buffer
