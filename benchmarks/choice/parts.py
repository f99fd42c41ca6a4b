"""Parts: each is one mix of one model under one cap, with a name.

    MODEL/SIZE/CAP/MIX    unet/2048/8/again50+host

CAP is in GiB. MIX is `chosen` (what `mural.plan` gives) or one of the fixed set. A `setting` is a name without its mix.
This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

CHOSEN = "chosen"
AGAIN = {
    "keep": 0.0, "again12": 0.125, "again25": 0.25, "again37": 0.375, "again50": 0.5, "again62": 0.625, "again75": 0.75,
    "again87": 0.875, "again100": 1.0,
}  # fmt: skip
"""The share of the ranked blocks that is computed again, those first that free most bytes for each second."""
HOST = "+host"
"""With offload of activations, as much as the cap asks for."""
TILES = {"tile1": 1.0, "tile75": 0.75, "tile50": 0.5}
"""Streamed: the largest tile that fits, its sides times this."""
MORE_TILES = {f"tile{percent}": percent / 100 for percent in (95, 90, 85, 80, 70, 65, 60, 55, 45)}
"""Others, for images of which only tiles fit."""
STRIPS = {"flat2": (0.5, 2.0), "flat4": (0.25, 4.0), "tall2": (2.0, 0.5), "flat1": (0.5, 1.0), "tall1": (1.0, 0.5)}
"""Tiles that are no squares: the sides of the largest that fits times these, as far as the image goes."""
MORE_AGAIN = {f"again{percent}": sixteenths / 16 for percent, sixteenths in zip(
    ("06", "19", "31", "44", "56", "69", "81", "94"), range(1, 16, 2), strict=True
)}  # fmt: skip
"""The shares of ranked blocks between those of `AGAIN`."""
PLACES = ("first", "last", "other")
"""As one would choose blocks by hand: the first half of them, the last, or every other one."""
ENOUGH = 12
"""So many mixes are compared with the chosen one; where fewer run, there are those of `MORE` too."""
SPARE, SPARED = "+spare", 7 / 8
"""Planned for so much of the cap: more leaves or travels, and the allocator has room left over."""
LEAN = "lean+host"
"""All blocks are computed again but those that, computed again alone, exceed the room whatever leaves. It is no prefix
of the ranked blocks, so the planner does not consider it."""
ALONE = ("keep", "again25", "again50", "again75", "again100", "all")
MORE = (
    *(name + HOST for name in (*MORE_AGAIN, *PLACES)), *(name + HOST + SPARE for name in AGAIN), *MORE_TILES, *STRIPS,
    *(name + SPARE for name in TILES),
)  # fmt: skip
USUAL = (*ALONE, *(name + HOST for name in AGAIN), LEAN, *TILES)
FIXED = (*USUAL, *MORE)
MIXES = (CHOSEN, *FIXED)
BATCHES = {"unet": 1, "resnet50": 5, "swin_t": 3}
"""Images of a step: ResNet-50 and Swin-T then need about 17 GiB at 2048² when everything is kept."""
OVER = 1.1
"""A mix whose predicted peak is so many times the cap is not run."""
SLOW = 5.0
"""Nor is one whose predicted seconds are so many times those of the chosen mix."""
START, STEPS, PINNING = 2.0, 7, 0.5
"""Seconds until a model is on the device, steps of a part, and seconds to pin a GiB of the host."""
UNKNOWN = 15.0
"""Seconds of a part of which nothing is predicted."""


@dataclass(frozen=True)
class Part:
    """One mix of a model on images of a size, under a cap in GiB."""

    model: str
    size: int
    cap: int
    mix: str

    @property
    def setting(self) -> str:
        """What mixes are compared in."""
        return f"{self.model}/{self.size}/{self.cap}"

    @property
    def name(self) -> str:
        """The name.

        >>> Part("swin_t", 2048, 8, "keep+host").name
        'swin_t/2048/8/keep+host'
        """
        return f"{self.setting}/{self.mix}"

    @classmethod
    def parse(cls, name: str) -> Part:
        """The part of that name.

        >>> Part.parse("unet/4096/16/tile2").cap
        16
        """
        found = re.fullmatch(rf"({'|'.join(BATCHES)})/([1-9]\d*)/([1-9]\d*)/([\w+]+)", name)
        if found is None or found[4] not in MIXES:
            raise ValueError(f"{name!r} is not the name of a part: `mural bench choice --list` prints them")
        return cls(found[1], int(found[2]), int(found[3]), found[4])

    @property
    def memory(self) -> str:
        """The cap, as a plan has it."""
        return f"{self.cap}GiB"


@dataclass(frozen=True)
class Sizes:
    """The sizes and caps at which models are measured."""

    images: tuple[tuple[str, int], ...] = (("unet", 2048), ("unet", 4096), ("resnet50", 2048), ("swin_t", 2048))
    caps: tuple[int, ...] = (4, 8, 16)


TOY = Sizes((("unet", 320), ("resnet50", 128), ("swin_t", 64)), (8,))


def all_parts(sizes: Sizes) -> list[Part]:
    """All parts; of each setting, the chosen mix first."""
    settings = [(model, size, cap) for model, size in sizes.images for cap in sizes.caps]
    return [Part(*setting, mix) for setting in settings for mix in MIXES]


def selected(parts: list[Part], only: list[str]) -> list[Part]:
    """The parts whose names match a pattern, in the order of the patterns; a whole name need not be in the list.

    >>> [part.name for part in selected(all_parts(Sizes()), ["unet/*/8/keep", "unet/512/2/all"])]
    ['unet/2048/8/keep', 'unet/4096/8/keep', 'unet/512/2/all']
    """
    found: dict[str, Part] = {}
    for pattern in only:
        matching = [part for part in parts if fnmatch(part.name, pattern)] or [Part.parse(pattern)]
        found |= {part.name: part for part in matching}
    return list(found.values())


# -- what a prediction says about a part -------------------------------------------------------------------------------


def doing(mix: Mapping[str, Any]) -> Any:
    """What a mix does: two of the same are one mix, whatever they are called. None: it cannot be.

    Tiles of any form are the same bands of rows where values are kept on the host. How much leaves, and how much of
    what tiles hand on is there, follows from the memory that was planned for.
    """
    if "plan" not in mix:
        return None
    leaves = mix["moved"] > 0
    memory = mix["plan"]["memory"] if leaves or mix["tiles"] else ""
    return frozenset(mix["again"]), leaves, memory, tuple(map(tuple, mix["tiles"]))


def not_run(part: Part, predicted: Mapping[str, Any]) -> str | None:
    """Why a mix need not run, by the prediction of its setting; None: it runs."""
    if part.mix in MORE and sum(hindrance(predicted, name) is None for name in USUAL) >= ENOUGH:
        return "enough others run"
    return hindrance(predicted, part.mix)


def hindrance(predicted: Mapping[str, Any], name: str) -> str | None:
    """Why a mix cannot run, is another one's again, or is not worth its time; None: it may be compared."""
    mix = predicted["mixes"].get(name, {"impossible": "it was not predicted"})
    if "impossible" in mix:
        return f"impossible: {mix['impossible']}"
    if mix["same_as"]:
        return f"the same as {mix['same_as']}"
    if mix["peak"] > OVER * predicted["limit"]:
        return "predicted too large"
    limit = SLOW * predicted["mixes"][CHOSEN].get("seconds", mix["seconds"])
    return "predicted too slow" if mix["seconds"] > limit else None


def expected(part: Part, predicted: Mapping[str, Any] | None) -> float:
    """Seconds that a part takes on a GPU, roughly; none if it need not run."""
    if predicted is None:
        return UNKNOWN
    if not_run(part, predicted) is not None:
        return 0.0
    mix = predicted["mixes"][part.mix]
    moved = part.size**2 * 1e-6 if mix["plan"]["stream"] else mix["moved"] / 2**30
    return START + 1.3 * STEPS * mix["seconds"] + PINNING * moved
