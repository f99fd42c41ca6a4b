"""What is known of steps that were seen: their moments and plans, and the memory that is there before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from mural.memory.offload.step_trace import Kind, StepTrace
from mural.memory.offload.swap_plan import SwapPlan
from mural.memory.offload.swapped_memory import strong


@dataclass
class KnownStep:
    """A kind of step: its moments, the memory that is saved at some, the calls that get what was there before, its
    trace and its plan.
    """

    moments: list[int]
    births: dict[int, int]
    calls: frozenset[tuple[int, int]]
    trace: StepTrace
    plan: SwapPlan
    timed: bool


@dataclass
class KnownStorages:
    """The storages that were found in tensors at some places in memory: as long as the places are the same."""

    places: Sequence[int] = ()
    storages: Sequence[tuple[StorageWeakRef, Kind]] = ()

    @staticmethod
    def of(places: Sequence[int], storages: Iterable[tuple[UntypedStorage, Kind]]) -> KnownStorages:
        """Storages that were found."""
        return KnownStorages(places, [(StorageWeakRef(storage), kind) for storage, kind in storages])

    def found(self, places: Sequence[int]) -> list[tuple[UntypedStorage, Kind]] | None:
        """The storages, if the tensors are at the same places; None if these have to be looked at again."""
        if places != self.places or any(ref.expired() for ref, _ in self.storages):
            return None
        return [(strong(ref), kind) for ref, kind in self.storages]


def described(given: Any) -> tuple[Any, ...]:
    """What tells the steps on inputs of different shapes apart."""
    return tuple(
        (tuple(leaf.shape), getattr(leaf, "dtype", None)) if hasattr(leaf, "shape") else str(leaf)
        for leaf in pytree.tree_leaves(given)
    )
