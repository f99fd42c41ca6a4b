"""The ways of the figure: one process with one target, and 1, 4 and 7 targets over ranks, by domain and by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.case import GIB

DEVICE_GIB, CONTEXT_GIB = 136.0, 0.7
"""What all ranks share on an H200, and what each takes of it before it allocates anything."""
PUBLISHED_SIDE = 768
"""The document: the largest image of one process with one target on a V100 of 16 GB, batch 2."""
BATCH = 2


@dataclass(frozen=True)
class Way:
    """A number of targets, and where the network's parts are."""

    targets: int
    placement: Literal["one process", "by domain", "by part", "by part, computed again"]

    @property
    def name(self) -> str:
        """As the page calls it."""
        return f"1 + {self.targets}, {self.placement}"

    @property
    def ranks(self) -> int:
        """By part, each private and each call of the shared encoder has one, reconstruction and head one each."""
        domains = 1 + self.targets
        return {"one process": 1, "by domain": domains}.get(self.placement, 2 * domains + 2)

    @property
    def searched(self) -> bool:
        """Whether its largest image is searched for; of the last ways, only the table's sides are measured."""
        return self.placement != "by part, computed again"

    def cap(self, most: float) -> int:
        """The bytes of each rank: those asked for, or as many as the ranks of one device have.

        >>> Way(1, "by part").cap(16.0) == 16 * GIB, round(Way(7, "by part").cap(16.0) / GIB, 1)
        (True, 6.9)
        """
        return int(min(most, DEVICE_GIB / self.ranks - CONTEXT_GIB) * GIB)


WAYS = (
    Way(1, "one process"),
    *(Way(targets, "by domain") for targets in (1, 4, 7)),
    *(Way(targets, "by part") for targets in (1, 4, 7)),
    *(Way(targets, "by part, computed again") for targets in (1, 4, 7)),
)
SIDES = (256, 512, 768, 1024, 1536)
"""Where all ways are measured."""
