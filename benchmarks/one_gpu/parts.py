"""Parts: each is one measurement in a process of its own, with a name by which it can be asked for.

    MODEL/WAY[CAP]/PRECISION/NORM/SIZE[@TILE][+EXTRA…]       unet/stream16/bf16/frozen/8192@1024+recompute

The cap is in GiB; without one, the whole device may be used. This module imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from math import ceil

IN_MEMORY = ("plain", "checkpoint", "save_on_cpu")
STREAMED = ("stream", "file")
"""From a source that makes its boxes as they are read, or from files that the benchmark writes."""
WAYS = (*IN_MEMORY, *STREAMED, "lightstream")
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
NORMS = ("frozen", "training", "instance")
EXTRAS = ("recompute", "tuned", "float")
"""Blocks computed again in backward; cuDNN tries its algorithms; the source holds float32 in place of uint8."""


@dataclass(frozen=True)
class Costs:
    """About what a model takes: chooses tiles that nobody named, and says whether a part may still begin."""

    dims: int
    halo: int
    """Positions that an output reaches beyond itself, on each side."""
    weights: float
    """GiB that do not grow with the image."""
    gib: dict[str, float]
    """GiB for each million positions in memory."""
    ms: dict[str, float]
    """Milliseconds for each million positions in memory."""


COSTS = {
    "unet": Costs(2, 96, 0.5, {"fp32": 5.4, "bf16": 2.96}, {"fp32": 47, "bf16": 17.5}),
    "resnet50": Costs(2, 256, 0.4, {"fp32": 1.9, "bf16": 1.0}, {"fp32": 15, "bf16": 8}),
    "unet3d": Costs(3, 48, 0.4, {"fp32": 1.9, "bf16": 1.0}, {"fp32": 80, "bf16": 40}),
}
SLOWER = {"checkpoint": 2.2, "save_on_cpu": 8.0, "stream": 1.6, "file": 1.6, "lightstream": 4.0}
"""Times of a way over those in memory, roughly."""
START = 8.0
"""Seconds until a process that waits, with everything imported, has taken a small step on the device."""
FILLED = 0.97
"""The share of a cap that tiles are chosen for."""
PATTERN = re.compile(
    rf"({'|'.join(COSTS)})/({'|'.join(WAYS)})(\d*)/({'|'.join(PRECISIONS)})/({'|'.join(NORMS)})"
    rf"/(\d+)(?:@(\d+))?((?:\+(?:{'|'.join(EXTRAS)}))*)"
)


@dataclass(frozen=True)
class Part:
    """One measurement: steps of a model on an image of some size (in every dim), in one way."""

    model: str
    way: str
    cap: int | None
    precision: str
    norm: str
    size: int
    tile: int = 0
    """0: chosen by the cap."""
    extras: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name.

        >>> Part("unet", "stream", 16, "bf16", "frozen", 8192, 1024, ("tuned",)).name
        'unet/stream16/bf16/frozen/8192@1024+tuned'
        """
        tile = f"@{self.tile}" if self.tile else ""
        extras = "".join(f"+{extra}" for extra in self.extras)
        return f"{self.model}/{self.way}{self.cap or ''}/{self.precision}/{self.norm}/{self.size}{tile}{extras}"

    @classmethod
    def parse(cls, name: str) -> Part:
        """The part of that name.

        >>> Part.parse("resnet50/plain/fp32/training/4096").cap is None
        True
        """
        found = PATTERN.fullmatch(name)
        if found is None:
            raise ValueError(f"{name!r} is not the name of a part: MODEL/WAY[CAP]/PRECISION/NORM/SIZE[@TILE][+EXTRA…]")
        model, way, cap, precision, norm, size, tile, extras = found.groups()
        given = tuple(extra for extra in extras.split("+") if extra)
        return cls(model, way, int(cap) if cap else None, precision, norm, int(size), int(tile or 0), given)

    @property
    def costs(self) -> Costs:
        """About what the model takes."""
        return COSTS[self.model]

    @property
    def millions(self) -> float:
        """Megapixels of the image, or millions of voxels."""
        return self.size**self.costs.dims / 1e6

    @property
    def chosen_tile(self) -> int:
        """The tile: as named, or the largest whose window fits under the cap; the image is divided evenly.

        lightstream's is the window itself.

        >>> Part.parse("unet/stream16/bf16/frozen/8192").chosen_tile
        2048
        >>> Part.parse("unet/stream8/bf16/frozen/100000").chosen_tile
        1344
        """
        if self.tile:
            return self.tile
        room = FILLED * (self.cap or 128) - self.costs.weights
        window = (room / self.costs.gib[self.precision] * 1e6) ** (1 / self.costs.dims)
        if self.way == "lightstream":
            return min(self.size, int(window) // 32 * 32)
        largest = max(32, int(window - 2 * self.costs.halo) // 32 * 32)
        even = self.size / ceil(self.size / largest)
        return ceil(even / 32) * 32

    @property
    def expected(self) -> float:
        """Seconds that it takes, roughly, from its start."""
        times = SLOWER.get(self.way, 1.0)
        if self.way in STREAMED:
            times *= (1 + 2 * self.costs.halo / self.chosen_tile) ** self.costs.dims / 1.2
            times *= 1.9 if self.norm != "frozen" else 1.0
        step = times * self.millions * self.costs.ms[self.precision] / 1000
        return START + step + min(5 * step, 15.0)  # the one to warm up, and repetitions

    @property
    def series(self) -> Part:
        """What all sizes have in common."""
        return replace(self, size=0)

    def tiled(self, tile: int) -> Part:
        """The same part with that tile (0: as it is), where it takes the image in tiles and names none."""
        return self if self.tile or self.way in IN_MEMORY else replace(self, tile=tile)


@dataclass(frozen=True)
class Sizes:
    """The sizes at which each kind of part is measured."""

    plain: tuple[int, ...] = (2048, 4096)
    plain_bf16: tuple[int, ...] = (5120, 6144)
    capped: tuple[int, ...] = (1024, 1536, 2048, 3072, 4096)
    stream: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 100_000)
    file: int = 65536
    resnet: tuple[int, ...] = (4096, 8192, 16384)
    volume: tuple[int, ...] = (128, 256, 512, 1024)
    volume_plain: tuple[int, ...] = (128, 256)


TOY = Sizes((48, 64), (80,), (32, 48), (64, 100), 96, (64, 96), (16, 32), (16,))
LONGEST = 520.0
"""Seconds: a part that is expected to take longer is not in the list, but can be asked for by its name."""
PINNED = 3072
"""The largest size in fp32 whose saved tensors 128 GiB of host memory hold: torch pins powers of two."""
BOTH = ("bf16", "fp32")
TWO = ("frozen", "training")


def all_parts(sizes: Sizes) -> list[Part]:
    """All parts, those that others are compared with first, then in order of importance."""
    groups = [
        unets(("plain",), (None,), BOTH, TWO, sizes.plain),
        unets(("plain",), (None,), ("bf16",), TWO, sizes.plain_bf16),
        unets(("stream",), (16,), ("bf16",), ("frozen",), sizes.stream),
        unets(("stream",), (16,), ("bf16",), ("training",), sizes.stream),
        unets(("file",), (16,), ("bf16",), ("frozen",), (sizes.file,)),
        unets(("stream",), (16,), ("fp32",), TWO, sizes.stream),
        unets(IN_MEMORY, (16,), BOTH, ("training",), sizes.capped),
        unets(IN_MEMORY, (16,), BOTH, ("frozen",), sizes.capped),
        unets(("stream",), (8, 4), BOTH, TWO, sizes.stream[:3]),
        resnets(sizes),
        volumes(sizes),
    ]
    found = [part for group in groups for part in group]
    return [part for part in found if part.expected < LONGEST and not too_much_pinned(part)]


def too_much_pinned(part: Part) -> bool:
    """Whether a host could be killed by the pinned memory of a part."""
    return part.way == "save_on_cpu" and part.precision == "fp32" and part.size > PINNED


def unets(
    ways: tuple[str, ...],
    caps: tuple[int | None, ...],
    precisions: tuple[str, ...],
    norms: tuple[str, ...],
    sizes: tuple[int, ...],
) -> list[Part]:
    """The classic U-Net in all these combinations, sizes ascending in each."""
    return [
        Part("unet", way, cap, precision, norm, size)
        for way in ways
        for precision in precisions
        for norm in norms
        for cap in caps
        for size in sizes
    ]


def resnets(sizes: Sizes) -> list[Part]:
    """ResNet-50: in memory, streamed, and by lightstream, whose norms are frozen."""
    plain = [Part("resnet50", "plain", None, p, norm, sizes.resnet[0]) for p in BOTH for norm in TWO]
    ours = [Part("resnet50", "stream", 16, p, norm, size) for p in BOTH for norm in TWO for size in sizes.resnet]
    theirs = [Part("resnet50", "lightstream", 16, p, "frozen", size) for p in BOTH for size in sizes.resnet]
    return plain + ours + theirs


def volumes(sizes: Sizes) -> list[Part]:
    """The 3D U-Net: in memory, then streamed."""
    norms = ("frozen", "instance")
    plain = [Part("unet3d", "plain", None, "bf16", norm, size) for norm in norms for size in sizes.volume_plain]
    ours = [Part("unet3d", "stream", 16, "bf16", norm, size) for norm in norms for size in sizes.volume]
    return plain + ours


def selected(parts: list[Part], only: list[str]) -> list[Part]:
    """The parts whose names match a pattern, in the order of the patterns; a whole name need not be in the list.

    >>> [
    ...     part.size
    ...     for part in selected(all_parts(Sizes()), ["unet/stream16/bf16/frozen/8*", "unet/file4/bf16/frozen/96"])
    ... ]
    [8192, 96]
    """
    found: dict[str, Part] = {}
    for pattern in only:
        matching = [part for part in parts if fnmatch(part.name, pattern)] or [Part.parse(pattern)]
        found |= {part.name: part for part in matching}
    return list(found.values())
