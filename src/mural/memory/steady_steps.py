"""Steps of a tape that give the same for all tiles of a sweep: casts of weights, and what norms make of statistics.

They depend on parameters and totals alone. They run once in a sweep; a tile begins with what they gave. Half of the
steps of a U-Net's tile are of this kind, and small ones take the host as long as large ones.

    given: 0 window, 1 weight       2 = cast(1)  ─ once      3 = convolution(0, 2)  ─ each tile
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mural.memory.tape import FRESH, Slot, Step, slots_in


@dataclass(frozen=True)
class DividedSteps:
    """The steps that run once, those of each tile, and what the second ones take of the first."""

    once: tuple[Step, ...]
    each: tuple[Step, ...]
    carried: tuple[Slot, ...]


def divided(steps: Sequence[Step], results: Sequence[Slot], steady: Collection[Slot]) -> DividedSteps:
    """The steps that depend on steady tensors alone, and the others.

    Memory that somebody writes to, or that is returned, is made for each tile.
    """
    whose = Memories(steps)
    kept = whose.written | {whose.of(slot) for slot in results}
    known, once, each = set(steady), list[Step](), list[Step]()
    for step in steps:
        read, made = slots_in((step[1], list(step[2].values()))), slots_in((step[3],))
        same = known.issuperset(read) and not any(whose.of(slot) in kept for slot in (*read, *made))
        same = same and step[0] is not FRESH
        (once if same else each).append(step)
        known.update(made if same else ())
    needed = {slot for step in each for slot in slots_in((step[1], list(step[2].values())))}
    carried = [slot for step in once for slot in slots_in((step[3],)) if slot in needed]
    return DividedSteps(tuple(once), tuple(each), tuple(dict.fromkeys(carried)))


class Memories:
    """Which slots share their memory, and which memory is written to."""

    def __init__(self, steps: Sequence[Step]):
        self.first: dict[Slot, Slot] = {}
        writes: list[Slot] = []
        for func, args, kwargs, made in steps:
            schema = func._schema
            given = [*zip(schema.arguments, args, strict=False)]
            given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
            seen = [slot for a, item in given if a.alias_info is not None for slot in slots_in((item,))]
            for slot in slots_in((made,)) if seen else []:
                self._join(slot, seen[0])
            writes += [s for a, item in given if a.alias_info is not None and a.alias_info.is_write
                       for s in slots_in((item,))]  # fmt: skip
        self.written = {self.of(slot) for slot in writes}

    def of(self, slot: Slot) -> Slot:
        """The slot that stands for all that share its memory."""
        while slot in self.first:
            slot = self.first[slot]
        return slot

    def _join(self, one: Slot, other: Slot) -> None:
        one, other = self.of(one), self.of(other)
        if one != other:
            self.first[one] = other


class SteadyValues:
    """What steps gave that run once in a sweep, shared by all kinds of tiles, until another sweep begins."""

    def __init__(self) -> None:
        self.sweep: Hashable = None
        self.values: dict[Hashable, Any] = {}
        self.alive: dict[int, Tensor] = {}
        """All tensors that were given: while they live, no others have their ids."""
        self.held: dict[int, tuple[list[Tensor], list[int], list[Tensor]]] = {}
        """For each kind of tile: the tensors that were given, how often they had been written to, and what it takes."""

    def begin(self, sweep: Hashable) -> None:
        """Forget what was found, if this is another sweep."""
        if sweep != self.sweep:
            self.sweep, self.values, self.alive, self.held = sweep, {}, {}, {}

    def of(self, kind: int, steps: DividedSteps, given: Iterable[tuple[Slot, Tensor]]) -> list[Tensor]:
        """What tiles of a kind begin with, of steady tensors."""
        given = list(given)
        tensors = [tensor for _, tensor in given]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        before = self.held.get(kind)
        if (
            before is not None
            and before[1] == versions
            and all(a is b for a, b in zip(before[0], tensors, strict=True))
        ):
            return before[2]
        names: dict[Slot, Hashable] = {
            slot: (id(tensor), version) for (slot, tensor), version in zip(given, versions, strict=True)
        }
        self.alive.update((id(tensor), tensor) for tensor in tensors)
        found: dict[Slot, Tensor] = dict(given)
        for step in steps.once:
            self._run(step, names, found)
        self.held[kind] = tensors, versions, [found[slot] for slot in steps.carried]
        return self.held[kind][2]

    def _run(self, step: Step, names: dict[Slot, Hashable], found: dict[Slot, Tensor]) -> None:
        func, args, kwargs, made = step
        key = (func, named(args, names), named(sorted(kwargs.items()), names))
        if key not in self.values:
            values = {n: filled(item, found) for n, item in kwargs.items()}
            self.values[key] = func(*filled(args, found), **values)
        results = self.values[key]
        for place, slot in enumerate(made if isinstance(made, (list, tuple)) else [made]):
            if slot is not None:
                found[slot] = results[place] if isinstance(made, (list, tuple)) else results
                names[slot] = (key, place)


def named(item: Any, names: dict[Slot, Hashable]) -> Hashable:
    """Arguments as a key: tensors by how they were made."""
    if isinstance(item, Slot):
        return names[item]
    if isinstance(item, (list, tuple)):
        return type(item).__name__, tuple(named(part, names) for part in item)
    return type(item), item  # numbers that are equal may differ in type


def filled(item: Any, found: dict[Slot, Tensor]) -> Any:
    """Arguments with tensors in their slots."""
    if isinstance(item, Slot):
        return found[item]
    if isinstance(item, (list, tuple)):
        return type(item)(filled(part, found) for part in item)
    return item
