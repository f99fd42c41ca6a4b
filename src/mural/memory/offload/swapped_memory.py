"""Memory that leaves the device and comes back, under the tensors that use it.

A tensor's storage is emptied when its bytes are on the host, and filled again before an operation uses it: the tensor,
its views and autograd's own references stay what they are. Storages are only known by weak references, so they end when
they would have ended anyway.

    here ──leave──▶ leaving ──free──▶ away ──fetch──▶ coming ──use──▶ here
                       └──────────── use ─────────────────────────────▲

Copies run on streams of their own. The computing stream waits for a copy before it frees the memory, and before it
uses what came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from mural.comm.copy_streams import Moment
from mural.memory.host_memory import HostBuffer, HostMemory


@dataclass(eq=False)
class Swapped:
    """One storage that may leave, as `SwappedMemory` knows it."""

    storage: StorageWeakRef
    size: int
    state: Literal["here", "leaving", "away", "coming"] = "here"
    host: HostBuffer | None = None
    current: bool = False
    """Whether the host has what the storage holds."""
    moment: Moment = None
    held: UntypedStorage | None = None
    """The storage itself while its bytes come: its memory must not be given to others meanwhile."""
    lasting: bool = False
    """Whether it belongs to the model or the optimizer; else it may be free only while autograd alone holds it."""
    changes: bool = False
    """Whether steps write to it, so that what the host has is old whenever it leaves."""
    holders: int = 0
    """Tensors that autograd saved, and that nobody reaches but through their gates."""

    def found(self) -> UntypedStorage | None:
        """The storage, unless it is gone."""
        return strong(self.storage)

    def alone(self) -> bool:
        """Whether no tensor but those that autograd saved uses the storage."""
        storage = self.found()
        return storage is not None and references(self.storage.cdata) == ONE_TENSOR + self.holders - 1


class SwappedMemory:
    """All storages of one device that may leave; `absent` are those that are not simply here."""

    def __init__(self, host: HostMemory):
        self.host = host
        self.known: dict[int, Swapped] = {}
        self.absent: dict[int, Swapped] = {}
        self.away = 0
        """Bytes that are free on the device, since what they held is on the host."""
        self.moved = [0, 0]
        """Bytes that were copied to the host, and back."""

    def entry(self, storage: UntypedStorage, lasting: bool = False, changes: bool = False) -> Swapped:
        """A storage, known from now on; for one that lasts, what the host has is old."""
        found = self.known.get(storage._cdata)
        if found is None:
            found = self.known[storage._cdata] = Swapped(StorageWeakRef(storage), storage.nbytes(), lasting=lasting)
        if lasting:
            found.current, found.changes = False, changes
        return found

    # -- moves ---------------------------------------------------------------------------------------------------------

    def leave(self, ones: Iterable[Swapped]) -> None:
        """Have the bytes of storages copied to the host, unless they are there."""
        copies: list[tuple[Swapped, Tensor, Tensor]] = []
        for one in ones:
            storage = one.found()
            if storage is None or one.state != "here" or not may_be_emptied(storage):
                continue
            if not one.current or one.changes:
                one.host = self.host.take(one.size) if one.host is None else one.host
                copies.append((one, one.host.memory[: one.size], bytes_in(storage)))
                one.current = True
                self.moved[0] += one.size
            one.state = "leaving"
            self.absent[one.storage.cdata] = one
        self._copy(copies, outward=True)

    def free(self, one: Swapped) -> None:
        """Give the memory of a storage to others, from when its bytes have left."""
        storage = one.found()
        if storage is None or one.state != "leaving" or not may_be_emptied(storage) or not (one.lasting or one.alone()):
            return
        self._wait(one)
        storage.resize_(0)
        one.state = "away"
        self.away += one.size

    def fetch(self, ones: Iterable[Swapped]) -> None:
        """Take memory for storages again, and have their bytes copied there."""
        copies: list[tuple[Swapped, Tensor, Tensor]] = []
        for one in ones:
            storage = one.found()
            if storage is None or one.state != "away" or one.host is None:
                continue
            storage.resize_(one.size)
            copies.append((one, bytes_in(storage), one.host.memory[: one.size]))
            one.state, one.held = "coming", storage
            self.away -= one.size
            self.moved[1] += one.size
        self._copy(copies, outward=False)

    def use(self, one: Swapped) -> None:
        """Have a storage here for the operation that follows."""
        if one.state == "away":
            self.fetch([one])
        if one.state == "coming":
            self._wait(one)
        one.state, one.held = "here", None
        self.absent.pop(one.storage.cdata, None)

    def swap_out(self, ones: Iterable[Swapped], size: float) -> int:
        """The bytes that became free, at least `size` if there were so many: one storage after the other leaves."""
        found = 0
        for one in ones:
            if found >= size:
                break
            if one.state == "here" and not one.storage.expired() and (one.lasting or one.alone()):
                before = self.away
                self.leave([one])
                self.free(one)
                found += self.away - before
        return found

    def all_here(self) -> None:
        """Have everything here that is still in use, and forget what is not."""
        self.forget_gone()
        self.fetch(self.absent.values())
        for one in list(self.absent.values()):
            self.use(one)

    def forget_gone(self) -> None:
        """Forget what is away and will not be used again."""
        for key, one in list(self.absent.items()):
            if one.storage.expired():
                self.away -= one.size if one.state == "away" else 0
                one.state = "here"
                del self.absent[key]

    def forget(self, but: Iterable[int] = ()) -> None:
        """Give the host's memory back, but that of some storages; a storage that begins anew is another one."""
        kept = set(but)
        for key, one in list(self.known.items()):
            if key not in kept or one.storage.expired():
                if one.host is not None:
                    self.host.give(one.host)
                del self.known[key]

    def _copy(self, copies: Sequence[tuple[Swapped, Tensor, Tensor]], outward: bool) -> None:
        """Copy bytes from the last tensors to those before, after all that is computed up to now."""
        lanes = self.host.lanes
        if lanes is None:
            for _, target, source in copies:
                target.copy_(source)
        elif copies:
            moments = lanes.copies([(target, source) for _, target, source in copies], outward, [lanes.now()])
            for (one, _, _), moment in zip(copies, moments, strict=True):
                one.moment = moment

    def _wait(self, one: Swapped) -> None:
        """Make the computing stream wait for the last copy of a storage."""
        if self.host.lanes is not None and one.moment is not None:
            self.host.lanes.wait([one.moment])
        one.moment = None


def may_be_emptied(storage: UntypedStorage) -> bool:
    """Whether torch alone uses a storage: no array of NumPy shares it, and no other process."""
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def strong(storage: StorageWeakRef) -> Any:
    """The storage of a weak reference, None if it is gone."""
    return UntypedStorage._new_with_weak_ptr(storage.cdata)  # type: ignore[attr-defined]


def references(storage: int) -> int:
    """How many references torch counts to a storage."""
    return torch._C._storage_Use_Count(storage)  # type: ignore[attr-defined]


def one_tensor() -> int:
    """How many references torch counts to a storage that one tensor has, looked at through a weak reference."""
    tensor = torch.empty(1)
    one = Swapped(StorageWeakRef(tensor.untyped_storage()), 4)
    storage = one.found()
    return references(one.storage.cdata) if storage is not None else 0


ONE_TENSOR = one_tensor()


def bytes_in(storage: UntypedStorage) -> Tensor:
    """The bytes of a storage as a tensor of their own."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
