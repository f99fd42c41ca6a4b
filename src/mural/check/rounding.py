"""What rounding explains: one device again, with its input and its parameters moved by a few ulps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.check.comparison import Row
from mural.check.leaves import Gap, counted_in_ulps, gap, kept, largest
from mural.check.updates import LeftValue, Name

PROBES = 4
"""Runs with moved inputs, at least; every rank makes one."""


class Reach(NamedTuple):
    """How many ulps probes are moved by, how many times as far as they got rounding may lead, and how many ulps of its
    largest entry any value may be off, for those that probes happen not to move.

    Errors grow with the number of terms where sums are kept in the type itself: always in 64 bits, on GPUs in 32. Sums
    of 16 bits are kept in 32, so that only results are rounded. Several ulps also show what jumps, as a maximum does
    between neighbours of nearly the same value.
    """

    ulps: float
    factor: float
    floor: float

    @classmethod
    def of(cls, eps: float) -> Reach:
        """The rounding of numbers whose neighbours are this far apart."""
        if eps > 2**-12:
            return cls(1.0, 8.0, 2.0)
        return cls(8.0, 64.0, 64.0) if eps > 2**-30 else cls(8.0, 512.0, 4096.0)


At = tuple[int, Name]
"""A value of a step."""


@dataclass(frozen=True)
class Reference:
    """What each step left on one device, how large it is, and how far rounding moves it."""

    values: Mapping[At, Any]
    before: Mapping[Name, Any]
    """Parameters and buffers at the beginning."""
    eps: float
    noise: Mapping[At, float] = field(default_factory=dict[At, float])

    @cached_property
    def sizes(self) -> dict[At, float]:
        """The largest entry of each value."""
        return {at: largest(value) for at, value in self.values.items()}

    @cached_property
    def scales(self) -> dict[tuple[int, str], float]:
        """The largest entry of all rounded values of a kind, in each step; of buffers, those that moved."""
        found: dict[tuple[int, str], float] = {}
        for (step, name), value in self.values.items():
            moved = name[0] != "buffer" or gap(value, self.before[name]).size > 0
            if rounded(value) and moved:
                found[step, name[0]] = max(found.get((step, name[0]), 0.0), self.sizes[step, name])
        return found

    def limit(self, at: At) -> float:
        """What rounding explains of a value's difference.

        A value that is not larger than its noise is a zero: there, an ulp of the model's largest counts.
        """
        (step, (kind, name)), value = at, self.values[at]
        reach = Reach.of(self.eps)
        explained = reach.factor * self.noise.get(at, 0.0)
        if not rounded(value):
            return explained
        eps = max(self.eps, torch.finfo(value.dtype).eps) if isinstance(value, Tensor) else self.eps
        size = self.sizes[at]
        floor = reach.floor * eps * (size if size > explained else max(size, self.scales.get((step, kind), 0.0)))
        if kind == "update":
            weight = self.before["parameter", name]
            floor += 2 * (step + 1) * torch.finfo(weight.dtype).eps * largest(weight)
        return explained + floor

    def row(self, at: At, found: Gap) -> Row:
        """A value's difference, with what rounding explains of it."""
        step, (kind, name) = at
        if at not in self.values:
            return Row(kind, name, step, inf, 0.0, found.words or "is not there on one device", inf)
        size = self.sizes[at]
        scale = max(size, self.scales.get((step, kind), 0.0)) if rounded(self.values[at]) else 1.0
        own = size or scale or 1.0
        return Row(kind, name, step, found.size / own, self.limit(at) / own, found.words, found.size / (scale or 1.0))


def rounded(value: Any) -> bool:
    """Whether rounding moves a value."""
    return counted_in_ulps(value) if isinstance(value, Tensor) else isinstance(value, float)


def left_behind(walked: Iterable[Sequence[LeftValue]]) -> dict[At, Any]:
    """What steps left, to be kept; results of micro-batches as those of the batch."""
    parts: dict[At, list[Any]] = {}
    for step, entries in enumerate(walked):
        for entry in entries:
            parts.setdefault((step, entry.name), []).append(kept(entry.value))
    return {at: torch.cat(found) if len(found) > 1 else found[0] for at, found in parts.items()}


def gaps(walked: Iterable[Sequence[LeftValue]], values: Mapping[At, Any]) -> dict[At, Gap]:
    """How far steps are from others, for each value of each step; of several parts of a value, the worst."""
    found: dict[At, Gap] = {}
    for step, entries in enumerate(walked):
        for entry in entries:
            at = (step, entry.name)
            other = entry.apart(values[at]) if at in values else Gap(inf, "is not there on one device")
            if at not in found or other.size > found[at].size:
                found[at] = other
    return found


@torch.no_grad()
def move(parameters: Iterable[Tensor], image: Any, eps: float, seed: int) -> Any:
    """The image with every entry moved up or down by a few ulps; so are the parameters."""
    generator = torch.Generator().manual_seed(seed)

    def moved(x: Tensor) -> Tensor:
        if not counted_in_ulps(x):
            return x
        signs = torch.randint(2, x.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        step = max(eps, torch.finfo(x.dtype).eps)
        return x + x * signs.to(x.device) * (step * Reach.of(step).ulps)

    for p in parameters:
        p.copy_(moved(p))
    return pytree.tree_map_only(Tensor, moved, image)
