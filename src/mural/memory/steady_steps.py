"""Steps of a tape that give the same for all tiles of a sweep: casts of weights, and what norms make of statistics.

They depend on parameters and totals alone. They run once in a sweep; a tile begins with what they gave. Half of the
steps of a U-Net's tile are of this kind, and small ones take the host as long as large ones.

    given: 0 window, 1 weight       2 = cast(1)  ─ once      3 = convolution(0, 2)  ─ each tile
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mural.memory.tape import FRESH, Slot, Step, slots_in


@dataclass(frozen=True)
class DividedSteps:
    """The steps that run once, those of each tile, and what the second ones take of the first."""

    once: tuple[Step, ...]
    each: tuple[Step, ...]
    carried: tuple[Slot, ...]


class SteadyGiven(NamedTuple):
    """A tensor that is given to all tiles of a sweep; `stays` says that it is at the same address in each step."""

    slot: Slot
    tensor: Tensor
    name: Hashable
    stays: bool


class LastingValues:
    """Tensors by name, at addresses that do not change as long as their form does not."""

    def __init__(self) -> None:
        self.tensors: dict[Hashable, Tensor] = {}

    def at(self, name: Hashable, tensor: Tensor) -> Tensor:
        """The same numbers, in the place of that name."""
        held = self.tensors.get(name)
        if held is None or form_of(held) != form_of(tensor):
            held = self.tensors[name] = torch.empty_like(tensor)
            if form_of(held) != form_of(tensor):  # it is expanded, or has gaps
                self.tensors[name] = tensor
                return tensor
        return held.copy_(tensor)


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """What the memory of a tensor is like."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


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
        self.numbers: dict[Hashable, int] = {}
        """Steps of all kinds of tiles: those with the same number make the same of the same tensors."""
        self.sweep: Hashable = None
        self.places: LastingValues | None = None
        """Where values are put, if they have to be at the same addresses in each sweep."""
        self.given: dict[Hashable, tuple[Tensor, int]] = {}
        """The tensors that were given, by name, and how often they had been written to."""
        self.values: dict[Hashable, Any] = {}
        self.held: dict[int, tuple[list[Tensor], list[int], list[Tensor]]] = {}
        """For each kind of tile: the tensors that were given, how often they had been written to, and what it takes."""

    def numbered(self, steps: DividedSteps, names: Iterable[tuple[Slot, Hashable]]) -> tuple[int, ...]:
        """The numbers of the steps that run once, of tensors with these names."""
        known: dict[Slot, Hashable] = {slot: ("given", name) for slot, name in names}
        found: list[int] = []
        for func, args, kwargs, made in steps.once:
            key = (func, named(args, known), named(sorted(kwargs.items()), known))
            found.append(self.numbers.setdefault(key, len(self.numbers)))
            results = made if isinstance(made, (list, tuple)) else [made]
            known |= {slot: (found[-1], place) for place, slot in enumerate(results) if slot is not None}
        return tuple(found)

    def begin(self, sweep: Hashable, places: LastingValues | None = None) -> None:
        """Forget what was found, if this is another sweep, or values are to be elsewhere."""
        if sweep != self.sweep or places is not self.places:
            self.sweep, self.places, self.given, self.values, self.held = sweep, places, {}, {}, {}

    def of(self, kind: int, steps: DividedSteps, numbers: Sequence[int], given: Sequence[SteadyGiven]) -> list[Tensor]:
        """What tiles of a kind begin with: the steady tensors that are given, and what steps made of them."""
        tensors = [one.tensor for one in given]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        before = self.held.get(kind)
        if (
            before is not None
            and before[1] == versions
            and all(a is b for a, b in zip(before[0], tensors, strict=True))
        ):
            return before[2]
        self._note(given, versions)
        found = {one.slot: self._given(one) for one in given}
        for step, number in zip(steps.once, numbers, strict=True):
            self._run(step, number, found)
        takes = [found[one.slot] for one in given] + [found[slot] for slot in steps.carried]
        self.held[kind] = tensors, versions, takes
        return takes

    def _note(self, given: Sequence[SteadyGiven], versions: Sequence[int]) -> None:
        """Forget all values if a tensor has changed, as those of another image have."""
        known = [(self.given.get(one.name), one.tensor, version) for one, version in zip(given, versions, strict=True)]
        if any(old is not None and (old[0] is not tensor or old[1] != version) for old, tensor, version in known):
            self.given, self.values, self.held = {}, {}, {}
        self.given.update((one.name, (one.tensor, version)) for one, version in zip(given, versions, strict=True))

    def _given(self, one: SteadyGiven) -> Tensor:
        """A tensor that is given, in its place if it has one."""
        if one.stays or self.places is None:
            return one.tensor
        name = ("given", one.name)
        if name not in self.values:
            self.values[name] = self.places.at(name, one.tensor)
        return self.values[name]

    def _run(self, step: Step, number: int, found: dict[Slot, Tensor]) -> None:
        """Run a step, unless its results are known; views are where their tensors are."""
        func, args, kwargs, made = step
        results = self.values.get(number)
        if results is None:
            results = func(*filled(args, found), **{n: filled(item, found) for n, item in kwargs.items()})
            if self.places is not None and not func.is_view:
                results = placed(results, number, self.places)
            self.values[number] = results
        if isinstance(made, (list, tuple)):
            found.update((slot, results[place]) for place, slot in enumerate(made) if slot is not None)
        elif made is not None:
            found[made] = results


def placed(results: Any, name: Hashable, places: LastingValues) -> Any:
    """Results of a step, where those of that name are."""
    if isinstance(results, Tensor):
        return places.at(name, results)
    if isinstance(results, (list, tuple)):
        return [placed(one, (name, place), places) for place, one in enumerate(results)]
    return results


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
