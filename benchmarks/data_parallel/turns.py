"""Turns: variants of a step that are set up in the same processes and measured one after the other, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
