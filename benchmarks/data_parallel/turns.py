"""Turns: variants of a step that are set up in the same processes and measured one after the other, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.clock import timed

WARMUP = 2


def taken(steps: Mapping[str, Callable[[], Any]], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of each variant's steps, the slowest rank's; each goes first as often as the others. Collective."""
    found: dict[str, list[float]] = {key: [] for key in steps}
    keys = list(steps)
    for number in range(WARMUP + rounds):
        turn = number % len(keys)
        for key in keys[turn:] + keys[:turn]:
            seconds = timed(steps[key], device)
            if number >= WARMUP:
                found[key].append(seconds)
    return found


@dataclass(frozen=True)
class Job:
    """Variants of the steps of a model on some ranks: a part of the benchmark and the kind of its records say which."""

    part: ClassVar[str]
    kind: ClassVar[str]
    model: str
    ranks: int
    rounds: int
    quick: bool = False

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"{self.part}/{self.model}/{self.ranks}"

    @property
    def about(self) -> dict[str, Any]:
        """What a record of it begins with."""
        return {"kind": self.kind, "name": self.name, "model": self.model, "ranks": self.ranks}
