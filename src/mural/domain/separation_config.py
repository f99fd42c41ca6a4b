"""What a separation network minimises: its losses, their weights, and how the similarity term sets in."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Literal

from mural.errors import ConfigError


@dataclass(frozen=True)
class Weights:
    """What each term counts next to the task's loss, whose weight is 1. Terms are means over domains."""

    reconstruction: float = 0.1
    difference: float = 0.05
    similarity: float = 0.25

    def __post_init__(self) -> None:
        for name in ("reconstruction", "difference", "similarity"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: the weight of a loss is a number of at least 0")


@dataclass(frozen=True)
class Ramp:
    """How strongly the similarity term pulls at the encoder, from step to step: 0 until `start`, then up to 1.

    It rises as in the paper of domain-adversarial networks, 2 / (1 + exp(-10 p)) - 1 for p from 0 to 1 over `length`
    steps. With `length` 0 it is there at once.

    >>> ramp = Ramp(start=100, length=1000)
    >>> [round(ramp.at(step), 2) for step in (0, 100, 200, 1100)]
    [0.0, 0.0, 0.46, 1.0]
    """

    start: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 0:
            raise ConfigError(f"start = {self.start}, length = {self.length}: numbers of steps are at least 0")

    def at(self, step: int) -> float:
        """The strength in a step, counted from 0."""
        if step < self.start:
            return 0.0
        if step >= self.start + self.length:
            return 1.0
        return 2 / (1 + exp(-10 * (step - self.start) / self.length)) - 1


@dataclass(frozen=True)
class Separation:
    """The losses of a separation network.

    `reconstruction` compares an image with what the decoder makes of its two codes: by the mean squared error, "mse",
    or regardless of a shift of all values, "scale-invariant". `similarity` makes the shared codes of all domains alike:
    by an "adversary" that tells domains apart, whose gradient is reversed, or by the maximum mean discrepancy from the
    source's, "mmd".
    """

    reconstruction: Literal["mse", "scale-invariant"] = "scale-invariant"
    similarity: Literal["adversary", "mmd"] = "adversary"
    weights: Weights = field(default_factory=Weights)
    ramp: Ramp = field(default_factory=Ramp)
