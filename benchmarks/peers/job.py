"""The job of one rank: which variant, which rows of which image, and the network that every variant runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

CHANNELS = 16


@dataclass(frozen=True)
class Job:
    """What a worker process is told when it starts."""

    variant: str
    rank: int
    ranks: int
    store: str
    size: int
    layers: int

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of a square image that this rank holds."""
        return rows_of(self.rank, self.ranks, self.size)

    def encode(self) -> str:
        """The job as one command line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Job:
        """The job from that argument."""
        return cls(**json.loads(text))


def rows_of(rank: int, ranks: int, size: int) -> tuple[int, int]:
    """First row, and row after the last, of one rank's piece.

    >>> rows_of(1, 2, 1024)
    (512, 1024)
    """
    return size * rank // ranks, size * (rank + 1) // ranks
