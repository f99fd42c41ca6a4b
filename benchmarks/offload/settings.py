"""How long and how large parts are: as published, or at toy size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What run.py asks a part's process for."""

    toy: bool = False
    epochs: int = 20
    """Of the document's training."""
    repeats: int = 6
    """Steps, or copies, of all other parts."""
    budget: float = 15.0
    """Seconds for the steps on activations."""

    @property
    def batch(self) -> int:
        """Images of a step of the document's training."""
        return 2 if self.toy else 32

    @property
    def epoch(self) -> int:
        """Steps of an epoch."""
        return 2 if self.toy else 8

    @property
    def dropped(self) -> int:
        """Steps whose times do not count."""
        return 2 if self.toy else 5
