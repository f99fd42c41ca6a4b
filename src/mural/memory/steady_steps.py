"""Steps of a tape that give the same for all tiles of a sweep: casts of weights, and what norms make of statistics.

They depend on parameters and totals alone. They run once in a sweep; a tile begins with what they gave. Half of the
steps of a U-Net's tile are of this kind, and small ones take the host as long as large ones.

    given: 0 window, 1 weight       2 = cast(1)  ─ once      3 = convolution(0, 2)  ─ each tile
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
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


class Name(NamedTuple):
    """How a value was made: of which tensors, and of tensors of which names, which are the same in each step."""

    value: Hashable
    lasting: Hashable


class Names:
    """The names of all values of a tape so far."""

    def __init__(self) -> None:
        self.values: dict[Slot, Hashable] = {}
        self.lasting: dict[Slot, Hashable] = {}

    def note(self, slot: Slot, value: Hashable, lasting: Hashable) -> Name:
        """Name a value."""
        self.values[slot], self.lasting[slot] = value, lasting
        return Name(value, lasting)

    def of(self, step: Step) -> Name:
        """The name of what a step makes."""
        func, args, kwargs, _ = step
        more = sorted(kwargs.items())
        return Name(*((func, named(args, by), named(more, by)) for by in (self.values, self.lasting)))


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
        self.sweep: Hashable = None
        self.values: dict[Hashable, Any] = {}
        self.alive: dict[int, Tensor] = {}
        """All tensors that were given: while they live, no others have their ids."""
        self.held: dict[int, tuple[list[Tensor], list[int], list[Tensor]]] = {}
        """For each kind of tile: the tensors that were given, how often they had been written to, and what it takes."""
        self.places: LastingValues | None = None
        """Where values are put, if they have to be at the same addresses in each sweep."""
        self.owners: dict[Hashable, Hashable] = {}
        """Which values are in those places now."""

    def begin(self, sweep: Hashable, places: LastingValues | None = None) -> None:
        """Forget what was found, if this is another sweep, or values are to be elsewhere."""
        if sweep != self.sweep or places is not self.places:
            self.sweep, self.values, self.alive, self.held = sweep, {}, {}, {}
            self.places, self.owners = places, {}

    def of(self, kind: int, steps: DividedSteps, given: Sequence[SteadyGiven]) -> list[Tensor]:
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
        self.alive.update((id(tensor), tensor) for tensor in tensors)
        names, found = Names(), dict[Slot, Tensor]()
        for one, version in zip(given, versions, strict=True):
            name = names.note(one.slot, (id(one.tensor), version), one.name)
            found[one.slot] = one.tensor if one.stays else self._placed(name, lambda it=one: it.tensor)
        for step in steps.once:
            self._run(step, names, found)
        takes = [found[one.slot] for one in given] + [found[slot] for slot in steps.carried]
        self.held[kind] = tensors, versions, takes
        return takes

    def _run(self, step: Step, names: Names, found: dict[Slot, Tensor]) -> None:
        func, args, kwargs, made = step
        name = names.of(step)

        def run() -> Any:
            return func(*filled(args, found), **{n: filled(item, found) for n, item in kwargs.items()})

        results = self._placed(name, run, func.is_view)
        for place, slot in enumerate(made if isinstance(made, (list, tuple)) else [made]):
            if slot is not None:
                found[slot] = results[place] if isinstance(made, (list, tuple)) else results
                names.note(slot, (name.value, place), (name.lasting, place))

    def _placed(self, name: Name, run: Callable[[], Any], view: bool = False) -> Any:
        """A value, found now or before in this sweep, in its place if it has one; views are where their tensors are."""
        if name.value in self.values:
            return self.values[name.value]
        results = run()
        if self.places is not None and not view:
            if name.lasting in self.owners:  # of another image
                self.values.pop(self.owners[name.lasting], None)
                self.held.clear()
            self.owners[name.lasting] = name.value
            results = placed(results, name.lasting, self.places)
        self.values[name.value] = results
        return results


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
