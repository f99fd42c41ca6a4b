"""What is trained: a run is a question, a depth, a patch, a learning rate and a seed, under settings that all share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from context.scene import Question


@dataclass(frozen=True)
class Settings:
    """What all runs share. A step always takes `images` × `size`² pixels, whatever the patch.

    `tries` seeds of each arm try every learning rate; the best goes on to `seeds` seeds. `together` runs train side
    by side in each of `workers` processes.
    """

    size: int = 512
    images: int = 2
    steps: int = 500
    width: int = 16
    pool: int = 1024
    validation: int = 16
    test: int = 64
    depths: tuple[tuple[Question, tuple[int, ...]], ...] = (("hilum", (2, 3, 5)), ("grade", (3, 5)), ("own", (5,)))
    divisions: tuple[int, ...] = (1, 2, 4, 8)
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    tries: int = 2
    seeds: int = 5
    together: int = 3
    workers: int = 5

    @property
    def patches(self) -> tuple[int, ...]:
        """The extents of the patches, the whole image first."""
        return tuple(self.size // division for division in self.divisions)

    @property
    def deepest(self) -> int:
        """The depth of the U-Net with the largest receptive field."""
        return max(depth for _, depths in self.depths for depth in depths)

    @property
    def arms(self) -> list[Arm]:
        """What is compared: each question with each of its depths and each patch."""
        return [Arm(q, depth, patch) for q, depths in self.depths for depth in depths for patch in self.patches]


@dataclass(frozen=True)
class Arm:
    """A question, the depth of the U-Net that learns it, and the extent of the patches that it learns from."""

    question: Question
    depth: int
    patch: int

    def encode(self) -> dict[str, Any]:
        """The arm as part of a record."""
        return asdict(self)


@dataclass(frozen=True)
class Run(Arm):
    """One training: an arm with a learning rate and a seed."""

    rate: float
    seed: int

    @property
    def arm(self) -> Arm:
        """The arm that this is a run of."""
        return Arm(self.question, self.depth, self.patch)


# Quick: everything once, in seconds on a CPU; the numbers mean nothing.
QUICK = Settings(
    size=64, images=2, steps=4, width=4, pool=8, validation=2, test=3, divisions=(1, 2),
    depths=(("hilum", (2, 3)), ("own", (2,))), rates=(1e-3, 2e-3), tries=1, seeds=2, together=2, workers=0,
)  # fmt: skip

# The comparison of ranks: whole images, few steps, in float64.
SAME = Settings(steps=20, pool=40)
