"""Parts: each is one measurement in a process of its own, with a name by which it can be asked for.

predict/SIDE/PRECISION/CAP        predict/32768/tf32/4          a label map, streamed under a cap in GiB
sliding/SIDE/PRECISION/OVERLAP    sliding/8192/tf32/0.25        a sliding window, and the whole image next to it
same/SIDE/PRECISION/PLAN          same/4096/float32/stream      a plan next to one rank that holds all of the image
cpu/SIDE/PRECISION/PLAN           cpu/1024/float32/ranks4       the same on the CPU

This module imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch

PRECISIONS = ("float32", "tf32", "bf16")
PLANS = ("stream", "ranks4", "ranks4+stream")
PATTERN = re.compile(
    rf"(predict|sliding|same|cpu)/([1-9]\d*)/({'|'.join(PRECISIONS)})/(\d+(?:\.\d+)?|{'|'.join(map(re.escape, PLANS))})"
)


@dataclass(frozen=True)
class Part:
    """One measurement; `option` is a cap, an overlap or a plan."""

    kind: str
    side: int
    precision: str
    option: str

    @property
    def name(self) -> str:
        """The name.

        >>> Part("predict", 32768, "tf32", "4").name
        'predict/32768/tf32/4'
        """
        return f"{self.kind}/{self.side}/{self.precision}/{self.option}"

    @classmethod
    def parse(cls, name: str) -> Part:
        """The part of that name.

        >>> Part.parse("same/4096/float32/ranks4+stream").option
        'ranks4+stream'
        """
        found = PATTERN.fullmatch(name)
        plans = found is not None and found[1] in ("same", "cpu")
        if found is None or plans != (found[4] in PLANS):
            raise ValueError(f"{name!r} is not the name of a part: `mural bench whole_image --list` prints them")
        return cls(found[1], int(found[2]), found[3], found[4])

    @property
    def cap(self) -> float | None:
        """GiB that the device has for this part; None: all of it."""
        return float(self.option) if self.kind == "predict" else None


@dataclass(frozen=True)
class Sizes:
    """What the parts are measured on, and by which network."""

    sides: tuple[int, ...] = (32768,)
    sliding: int = 8192
    same: int = 4096
    cpu: int = 1024
    precisions: tuple[str, ...] = ("tf32", "bf16")
    cap: float = 4.0
    width: int = 64
    depth: int = 4
    window: int = 512
    """Of the sliding window, and of the boxes that the network is trained on."""
    steps: int = 150
    tiles: tuple[int, ...] = (1024, 768, 512)
    """Tiles of streams: the first that fits."""


QUICK = Sizes((384,), 256, 192, 160, ("float32",), width=4, depth=2, window=64, steps=20, tiles=(128, 96))
ON_CPU = Sizes((2048, 8192), 1024, 1024, 1024, ("float32",), width=8, depth=3, window=128, steps=100, tiles=(512, 256))


def all_parts(sizes: Sizes, device: str) -> list[Part]:
    """All parts, the most important first."""
    found = [Part("predict", side, p, f"{sizes.cap:g}") for p in sizes.precisions for side in sizes.sides]
    found += [Part("sliding", sizes.sliding, sizes.precisions[0], overlap) for overlap in ("0.25", "0.5")]
    if device == "cuda":
        found += [Part("same", sizes.same, p, plan) for p in ("float32", "tf32") for plan in ("stream", "ranks4")]
    return found + [Part("cpu", sizes.cpu, "float32", plan) for plan in PLANS]


def selected(parts: list[Part], only: list[str]) -> list[Part]:
    """The parts whose names match a pattern, in the order of the patterns; a whole name need not be in the list.

    >>> [part.name for part in selected(all_parts(Sizes(), "cpu"), ["sliding/*", "predict/64/bf16/1"])][1:]
    ['sliding/8192/tf32/0.5', 'predict/64/bf16/1']
    """
    found: dict[str, Part] = {}
    for pattern in only:
        matching = [part for part in parts if fnmatch(part.name, pattern)] or [Part.parse(pattern)]
        found |= {part.name: part for part in matching}
    return list(found.values())
