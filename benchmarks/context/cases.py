"""What is trained: one run is a question, a depth of U-Net, a patch, a learning rate and a seed, under shared settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from context.scene import QUESTIONS, Question


@dataclass(frozen=True)
class Settings:
    """What all runs share. A step always takes `images` × `size`² pixels, whatever the patch."""

    size: int = 512
    images: int = 2
    steps: int = 600
    width: int = 16
    pool: int = 1536
    validation: int = 16
    test: int = 48
    depths: tuple[int, ...] = (2, 3, 5)
    divisions: tuple[int, ...] = (1, 2, 4, 8)
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    seeds: int = 5
    together: int = 3
    workers: int = 3
    questions: tuple[Question, ...] = QUESTIONS

    @property
    def patches(self) -> tuple[int, ...]:
        """The extents of the patches, the whole image first."""
        return tuple(self.size // division for division in self.divisions)


@dataclass(frozen=True)
class Run:
    """One training."""

    question: Question
    depth: int
    patch: int
    rate: float
    seed: int

    def encode(self) -> dict[str, Any]:
        """The run as a record."""
        return asdict(self)


# Quick: everything once, in seconds on a CPU; the numbers mean nothing.
QUICK = Settings(
    size=64, images=2, steps=4, width=4, pool=8, validation=2, test=3, depths=(2, 3), divisions=(1, 2),
    rates=(2e-3, 4e-3), seeds=2, together=2, workers=0, questions=("hilum", "own"),
)  # fmt: skip

# The comparison of ranks: whole images, few steps, in float64.
SAME = Settings(steps=20, pool=40)
