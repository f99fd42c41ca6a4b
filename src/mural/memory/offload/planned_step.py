"""A step that runs as planned: memory leaves after a moment, is free from a later one, and comes back in time.

Each moment is compared with the one that was noted, and each call that gets memory which leaves. Where they differ, the
plan ends: everything comes back, and the next step is noted anew. The result is the same in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, UntypedStorage, nn

from mural.memory.offload.moment_times import MomentTimes
from mural.memory.offload.moments import BEGIN, TAKEN, Saved, gated_by, has_storage
from mural.memory.offload.step_trace import Kind
from mural.memory.offload.swap_plan import Absence, SwapPlan, by_moment
from mural.memory.offload.swapped_memory import Swapped, SwappedMemory


class PlannedStep:
    """The step that runs; `moments` are those that were noted, `births` the memory that is saved first at some, and
    `calls` those that get memory which was there before.
    """

    def __init__(
        self,
        memory: SwappedMemory,
        plan: SwapPlan,
        moments: Sequence[int],
        births: Mapping[int, int],
        calls: Set[tuple[int, int]],
        outside: Iterable[tuple[UntypedStorage, Kind]],
        times: MomentTimes | None = None,
    ):
        self.memory, self.moments, self.calls, self.times = memory, moments, calls, times
        self.left, self.freed, self.fetched = (by_moment(plan.absences, name) for name in ("left", "freed", "fetched"))
        self.busy = {*(k + 1 for k in self.left), *self.freed, *self.fetched}
        leaving = {absence.memory for absence in plan.absences}
        self.births = {k: number for k, number in births.items() if number in leaving}
        self.storages: dict[int, Swapped] = {}
        self.lasting: dict[int, int] = {}
        """The numbers of memory that was there before and leaves, by its storage."""
        for number, (storage, kind) in enumerate(outside):
            if number in leaving:
                self.storages[number] = memory.entry(storage, lasting=True, changes=kind == "gradients")
                self.lasting[storage._cdata] = number
        self.saved: dict[int, Swapped] = {}
        """What autograd saved of this step and may leave, by its storage."""
        self.k, self.lost = 0, False
        self._begin(BEGIN)
        self._end()

    def save(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor."""
        if not has_storage(tensor):
            return tensor
        storage = tensor.untyped_storage()
        k = self._begin(storage.nbytes())
        kept: Any = tensor.detach()
        if k in self.births and not self.lost:
            one = self.storages[self.births[k]] = self.saved[storage._cdata] = self.memory.entry(storage)
        else:
            one = self.saved.get(storage._cdata)
        self._end()
        return kept if one is None else Saved(kept, one)

    def take(self, kept: Any) -> Tensor:
        """The tensor of which autograd kept that."""
        if isinstance(kept, Tensor) and not has_storage(kept):
            return kept
        self._begin(TAKEN)
        if isinstance(kept, Saved):
            self._open(kept.tensor)
            self._end()
            return kept.taken()
        self._open(kept)
        self._end()
        return kept

    def enter(self, number: int, module: nn.Module) -> None:
        """A module with parameters begins, forward or backward."""
        self._begin(number)
        if self.memory.absent:
            for tensor in gated_by(module, number):
                self._open(tensor)
        self._end()

    def called(self, tensor: Tensor, writes: bool) -> None:
        """A call gets a tensor: one that was not noted ends the plan, as backward may use the tensor again.

        So does one that writes, unless steps always write to that memory: the host would have old numbers.
        """
        number = self.lasting.get(tensor.untyped_storage()._cdata)
        if number is None or self.lost:
            return
        if (self.k - 1, number) in self.calls and (not writes or self.storages[number].changes):
            self._open(tensor)
        else:
            self._lose()

    def end(self) -> None:
        """After the last moment that was noted."""
        self._begin(BEGIN)
        self._end()
        self.lost = self.lost or self.k != len(self.moments)

    def _open(self, tensor: Tensor) -> None:
        """Have the memory of a tensor here."""
        one = self.memory.absent.get(tensor.untyped_storage()._cdata) if self.memory.absent else None
        if one is not None:
            self.memory.use(one)

    def _begin(self, what: int) -> int:
        if self.times is not None:
            self.times.stop()
        k, self.k = self.k, self.k + 1
        if self.lost:
            return k
        if k >= len(self.moments) or self.moments[k] != what:
            self._lose()
        elif k in self.busy:
            self._move(k)
        return k

    def _lose(self) -> None:
        """End the plan: everything comes back, and stays."""
        self.lost = True
        self.memory.all_here()

    def _move(self, k: int) -> None:
        """Do what is planned for a moment."""
        self.memory.leave(self._known(self.left.get(k - 1, ())))
        for one in self._known(self.freed.get(k, ())):
            self.memory.free(one)
        self.memory.fetch(self._known(self.fetched.get(k, ())))

    def _known(self, absences: Iterable[Absence]) -> list[Swapped]:
        """The storages of absences, as far as they are known."""
        return [self.storages[a.memory] for a in absences if a.memory in self.storages]

    def _end(self) -> None:
        if self.times is not None:
            self.times.start()
