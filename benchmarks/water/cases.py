"""Parts: each is one training, with a name.

windows/EXTENT/RATE/SEED    windows/64/0.001/0             a network on patches of this extent, or on whole windows
domains/WAY/RATE/SEED       domains/separation/0.001/0     one labelled continent, with or without the others' images
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

from mural.errors import ConfigError

WAYS = ("source-only", "separation")
WINDOW = 2048
"""Pixels of a side of a window, at full resolution."""


@dataclass(frozen=True)
class Settings:
    """What all parts share. A step always takes `windows` × `window`² pixels, whatever the patch.

    Domains take `domain_batch` windows of `domain_window`² of each continent in a step.
    """

    coarse: int = 1
    """Every so-manyth pixel of the map counts."""
    windows: int = 1
    patches: tuple[int, ...] = (64, 128, 256, 512)
    steps: int = 400
    width: int = 16
    depth: int = 6
    rates: tuple[float, ...] = (1e-3, 3e-3)
    seeds: int = 3
    domain_window: int = 512
    domain_batch: int = 4
    domain_steps: int = 300
    edges: tuple[int, ...] = (8, 32)
    """Distances from land, in pixels, that divide water into near and far."""

    def __post_init__(self) -> None:
        for extent in (*self.patches, self.domain_window):
            if extent < 2 or extent % 2 or self.window % extent:
                raise ConfigError(
                    f"patches of {extent} pixels for windows of {self.window}: tiles overlap by half and fill a "
                    f"window; take even divisors of {self.window}, for coarse = {self.coarse}"
                )

    @property
    def window(self) -> int:
        """Pixels of a side of a window."""
        return WINDOW // self.coarse

    @property
    def extents(self) -> tuple[int, ...]:
        """What a network is trained on: patches, and the whole window last."""
        return (*self.patches, self.window)

    def encode(self) -> dict[str, Any]:
        """The settings that decide what comes of a part, as a record has them."""
        left_out = ("patches", "rates", "seeds")
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        return found | {"window": self.window, "edges": list(self.edges)}


TOY = Settings(
    coarse=32, windows=1, patches=(16,), steps=2, width=2, depth=2, rates=(1e-3,), seeds=1, domain_window=16,
    domain_batch=1, domain_steps=2, edges=(1, 4),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One training: on windows of an extent, or of domains in some way."""

    kind: str
    way: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name.

        >>> Part("windows", "64", 1e-3, 0).name
        'windows/64/0.001/0'
        """
        return f"{self.kind}/{self.way}/{self.rate:g}/{self.seed}"

    @classmethod
    def parse(cls, name: str) -> Part:
        """The part of that name.

        >>> Part.parse("domains/separation/0.001/2").seed
        2
        """
        found = re.fullmatch(rf"(windows(?=/\d)|domains(?=/[a-z]))/([1-9]\d*|{'|'.join(WAYS)})/([\d.e-]+)/(\d+)", name)
        if found is None:
            raise ValueError(f"{name!r} is not the name of a part: `mural bench water --list` prints them")
        return cls(found[1], found[2], float(found[3]), int(found[4]))


def all_parts(settings: Settings) -> list[Part]:
    """All parts, seed after seed: what is cut off are whole seeds. Domains have one rate: nothing could choose it."""
    found: list[Part] = []
    for seed in range(settings.seeds):
        found += [Part("windows", str(e), rate, seed) for e in reversed(settings.extents) for rate in settings.rates]
        found += [Part("domains", way, settings.rates[0], seed) for way in WAYS]
    return found


def selected(parts: list[Part], only: list[str]) -> list[Part]:
    """The parts whose names match a pattern, in the order of the patterns; a whole name need not be in the list.

    >>> [part.name for part in selected(all_parts(Settings()), ["windows/2048/0.001/*", "windows/64/0.01/7"])][2:]
    ['windows/2048/0.001/2', 'windows/64/0.01/7']
    """
    found: dict[str, Part] = {}
    for pattern in only:
        matching = [part for part in parts if fnmatch(part.name, pattern)] or [Part.parse(pattern)]
        found |= {part.name: part for part in matching}
    return list(found.values())
