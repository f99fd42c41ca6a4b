"""A step that is noted while it runs: its moments, the memory that is used after each, and the time in between.

Memory that left comes back when its gate opens. Where there is a limit, what was saved first leaves first: backward
takes it last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mural.memory.offload.gauges import Gauge, GpuGauge, KnownGauge
from mural.memory.offload.moments import BEGIN, TAKEN, Saved, gated_by, has_storage
from mural.memory.offload.step_trace import Kind, StepTrace, TracedMemory
from mural.memory.offload.swapped_memory import Swapped, SwappedMemory, may_be_emptied
from mural.memory.offload.used_tensors import tensors_used, tensors_written, writes
from mural.shard import ShardedTensor

USED = 0.6
"""The part of the limit that is used at most after a moment, while nothing is known of the next ones."""


@dataclass(eq=False)
class NotedMemory:
    """One storage, as it is noted: after which moments it was used, and at which its gates opened."""

    swapped: Swapped
    kind: Kind
    uses: list[int] = field(default_factory=list[int])
    gates: list[int] = field(default_factory=list[int])
    alone: bool = False
    """Whether only autograd holds it."""

    def used(self, moment: int) -> None:
        """Note a use."""
        if not self.uses or self.uses[-1] != moment:
            self.uses.append(moment)


class NotedStep:
    """The step that is noted. `outside` is memory that was there before, with its kind, in a fixed order.

    Blocks of at least `least` bytes may leave; above the part of a limit, they do.
    """

    def __init__(
        self,
        memory: SwappedMemory,
        outside: Iterable[tuple[UntypedStorage, Kind]],
        kinds: Iterable[str],
        device: torch.device,
        limit: int | None,
        least: int,
        gauge: Gauge | None = None,
    ):
        self.memory, self.kinds, self.device, self.limit, self.least = memory, frozenset(kinds), device, limit, least
        self.noted: list[NotedMemory] = []
        self.held: list[NotedMemory] = []
        """Memory of the step that others than autograd hold."""
        self.number: dict[int, int] = {}
        self.moments: list[int] = []
        self.births: dict[int, int] = {}
        """The moments at which memory was saved first, and its number."""
        self.calls: set[tuple[int, int]] = set()
        """The moments after which calls got memory that was there before, and its number."""
        self.bytes: list[int] = []
        own = GpuGauge(device) if device.type == "cuda" else KnownGauge(device, self._alive)
        self.gauge: Gauge = own if gauge is None else gauge
        for storage, kind in outside:
            self._note(storage, kind if may_be_emptied(storage) else "fixed", lasting=True).uses = [-1]
        self._begin(BEGIN)
        self._end()

    # -- moments -------------------------------------------------------------------------------------------------------

    def save(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor."""
        if not has_storage(tensor):
            return tensor
        storage = tensor.untyped_storage()
        k, one, kept = self._begin(storage.nbytes()), self._known(storage), tensor.detach()
        if one is None and self._may_leave(storage):
            self.births[k] = len(self.noted)
            one = self._note(storage, "activations")
        if one is not None:
            one.used(k)
            kept = kept if one.swapped.lasting else Saved(kept, one.swapped)
        self._end()
        return kept

    def take(self, kept: Any) -> Tensor:
        """The tensor of which autograd kept that."""
        if isinstance(kept, Tensor) and not has_storage(kept):
            return kept
        k = self._begin(TAKEN)
        one = self._known((kept.tensor if isinstance(kept, Saved) else kept).untyped_storage())
        if one is not None:
            self._open(one, k)
            one.used(k)
        self._end()
        return kept.taken() if isinstance(kept, Saved) else kept

    def enter(self, number: int, module: nn.Module) -> None:
        """A module with parameters begins, forward or backward."""
        k = self._begin(number)
        for tensor in gated_by(module, number):
            one = self._known(tensor.untyped_storage())
            if one is not None:
                self._open(one, k)
        self._end()

    def used_now(self, tensors: Iterable[Tensor]) -> None:
        """Note that operations use tensors after the last moment."""
        for tensor in filter(has_storage, tensors):
            one = self._known(tensor.untyped_storage())
            if one is not None:
                one.used(len(self.moments) - 1)

    def written(self, tensors: Iterable[Tensor]) -> None:
        """Note that an operation writes to tensors: parameters then stay, as the host would have old numbers."""
        for tensor in filter(has_storage, tensors):
            one = self._known(tensor.untyped_storage())
            if one is not None and one.kind == "parameters":
                one.kind = "fixed"

    def called(self, tensor: Tensor, writes: bool) -> None:
        """Note that a call gets a tensor after the last moment; what is written is seen by operations."""
        number = self.number.get(tensor.untyped_storage()._cdata)
        if number is not None and self.noted[number].swapped.lasting:
            self.calls.add((len(self.moments) - 1, number))

    def _open(self, one: NotedMemory, k: int) -> None:
        one.gates.append(k)
        if one.swapped.storage.cdata in self.memory.absent:
            self.memory.use(one.swapped)

    def _begin(self, what: int) -> int:
        self.gauge.stop()
        self.memory.forget_gone()
        self.bytes.append(self.gauge.most() + self.memory.away)
        self.moments.append(what)
        return len(self.moments) - 1

    def _end(self) -> None:
        k = len(self.moments) - 1
        self.held = [one for one in self.held if not one.swapped.storage.expired()]
        for one in self.held:
            one.alone = one.swapped.alone()
            if not one.alone:
                one.used(k)
        self.held = [one for one in self.held if not one.alone]
        over = 0 if self.limit is None else self.gauge.now() - int(USED * self.limit)
        if over > 0:
            self.make_room(over)
        self.gauge.start()

    def make_room(self, size: float = inf) -> int:
        """The bytes that became free, at least `size` if so many can leave: those that are taken last, first."""
        last = len(self.moments) - 1
        return self.memory.swap_out((one.swapped for one in self.noted if self._is_idle(one, last)), size)

    def _is_idle(self, one: NotedMemory, k: int) -> bool:
        """Whether memory can leave now; parameters do not before it is known who uses them."""
        if one.kind not in self.kinds or one.swapped.size < self.least:
            return False
        return one.kind == "optimizer" or (one.kind == "activations" and one.alone and one.uses[-1] < k)

    def _alive(self) -> int:
        """Bytes of all memory that is known and here."""
        return sum(o.swapped.size for o in self.noted if not o.swapped.storage.expired()) - self.memory.away

    # -- memory --------------------------------------------------------------------------------------------------------

    def _known(self, storage: UntypedStorage) -> NotedMemory | None:
        number = self.number.get(storage._cdata)
        return None if number is None else self.noted[number]

    def _may_leave(self, storage: UntypedStorage) -> bool:
        return storage.nbytes() >= self.least and storage.device == self.device and may_be_emptied(storage)

    def _note(self, storage: UntypedStorage, kind: Kind, lasting: bool = False) -> NotedMemory:
        one = NotedMemory(self.memory.entry(storage, lasting, changes=kind == "gradients"), kind)
        self.number[storage._cdata] = len(self.noted)
        self.noted.append(one)
        if not lasting:
            self.held.append(one)
        return one

    def trace(self) -> StepTrace:
        """What was noted, once the step is over."""
        end = self._begin(BEGIN)
        self.gauge.start()
        found: list[TracedMemory] = []
        for one in self.noted:
            uses, gates = (one.uses, one.gates)
            if one.swapped.lasting:
                uses, gates = [*uses, end], [*gates, end]
            found.append(TracedMemory(one.swapped.size, one.kind, tuple(uses), frozenset(gates)))
        return StepTrace(self.gauge.seconds(), tuple(self.bytes[1:]), tuple(found))


class Noting(Protocol):
    """What is told of operations before they run."""

    def used_now(self, tensors: Iterable[Tensor]) -> None:
        """An operation uses tensors."""
        ...

    def written(self, tensors: Iterable[Tensor]) -> None:
        """An operation writes to tensors."""
        ...

    def make_room(self) -> int:
        """An operation found no memory: the bytes that became free for it."""
        ...


class Operations(TorchDispatchMode):
    """A block whose operations a step notes: who uses parameters, and when. It makes room for one that finds none."""

    def __init__(self, step: Noting):
        super().__init__()
        self.step = step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What an operation gives."""
        if func is torch.ops.aten.detach.default and isinstance(args[0], ShardedTensor):
            # Autograd takes a sharded tensor that it saved, as a checkpoint's input: its pieces have their own history.
            return ShardedTensor(args[0].local, args[0].placement, args[0].aliased, args[0].folds)
        self.step.used_now(tensors_used(func, args, kwargs or {}))
        if writes(func):
            self.step.written(tensors_written(func, args, kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            if func._schema.is_mutable or not self.step.make_room():
                raise
        return func(*args, **(kwargs or {}))
