"""What a demo run is asked to do, checked before any process starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from mural.errors import PlanError

CLASSES = ("background", "nuclei")
SMALLEST_PIECE = 16
MOST_RANKS = 16
# Every step multiplies the rounding of the steps before it; beyond this, rounding alone could look like an error.
MOST_STEPS = 30


@dataclass(frozen=True)
class Settings:
    """The size of the image, the grid of ranks that cuts it, and the training of the model."""

    steps: int = 8
    size: int = 512
    grid: tuple[int, int] = (2, 2)
    seed: int = 0
    width: int = 8
    depth: int = 3
    learning_rate: float = 0.3

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MOST_STEPS:
            raise PlanError(f"steps={self.steps}: the demo takes 1 to {MOST_STEPS}")
        if self.seed < 0:
            raise PlanError(f"seed={self.seed}: a seed is 0 or more")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise PlanError(f"grid={self.grid_name} needs {self.ranks} ranks on this machine: choose 1 to {MOST_RANKS}")
        if self.size < SMALLEST_PIECE * max(self.grid):
            least = SMALLEST_PIECE * max(self.grid)
            raise PlanError(f"size={self.size} is too small for the grid {self.grid_name}: choose {least} or more")

    @property
    def ranks(self) -> int:
        """The number of ranks, one for each piece of the grid."""
        return prod(self.grid)

    @property
    def grid_name(self) -> str:
        """The grid as it is written, rows × columns."""
        return "×".join(str(n) for n in self.grid)


def parse_grid(text: str) -> tuple[int, int]:
    """The rows and columns of a grid written as `2x2`.

    >>> parse_grid("2x3"), parse_grid("4×1")
    ((2, 3), (4, 1))
    """
    found = re.fullmatch(r"([1-9]\d?)[x×]([1-9]\d?)", text.strip().lower())
    if found is None:
        raise PlanError(f"grid={text!r}: write rows x columns, as in 2x2")
    return int(found[1]), int(found[2])
