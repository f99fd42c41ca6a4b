"""A case: one model on an image of some extents, cut over some ranks; plain data that travels as JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """What a team of ranks is asked to run: forward, loss and backward."""

    model: str
    extents: tuple[int, ...]
    ranks: int = 1
    precision: str = "float32"
    """Or "bfloat16": autocast, with model and image in channels-last order."""
    sharded: bool = True
    """False: plain torch on one device, without mural."""
    compiled: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    """Arguments of the model other than its defaults."""
    batch: int = 1
    """Images, all of these extents."""

    @property
    def positions(self) -> int:
        """Pixels of the whole image, or voxels, or samples."""
        return prod(self.extents)

    @property
    def title(self) -> str:
        """The case in a few words.

        >>> Case("CNN3D", (64, 64, 64), ranks=8).title
        'CNN3D 64³ float32, 8 ranks'
        """
        ranks = "plain torch" if not self.sharded else "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        compiled = ", compiled" if self.compiled else ""
        batch = f"{self.batch} × " if self.batch > 1 else ""
        return f"{self.model} {batch}{extents_text(self.extents)} {self.precision}{compiled}, {ranks}"

    def sized(self, extent: int) -> Case:
        """The same case on an image of that extent in every dim."""
        return replace(self, extents=(extent,) * len(self.extents))

    def encode(self) -> dict[str, Any]:
        """The case as JSON knows it; a batch of one image goes without saying."""
        batch = {"batch": self.batch} if self.batch > 1 else {}
        return {
            "model": self.model,
            "extents": list(self.extents),
            "ranks": self.ranks,
            "precision": self.precision,
            "sharded": self.sharded,
            "compiled": self.compiled,
            "options": dict(self.options),
            **batch,
        }

    @classmethod
    def decode(cls, found: dict[str, Any]) -> Case:
        """The case from JSON.

        >>> Case.decode(Case("CNN1D", (8,), options=(("width", 2),)).encode()).options
        (('width', 2),)
        """
        return cls(**{**found, "extents": tuple(found["extents"]), "options": tuple(found["options"].items())})


def extents_text(extents: tuple[int, ...]) -> str:
    """Extents as people write them.

    >>> extents_text((4096, 4096)), extents_text((1024, 2048)), extents_text((3 * 2**20,))
    ('4096²', '1024×2048', '3 Mi')
    """
    if len(extents) == 1:
        return f"{extents[0] / 2**20:g} Mi" if extents[0] >= 2**20 else str(extents[0])
    if len(set(extents)) == 1:
        return f"{extents[0]}{'²' if len(extents) == 2 else '³'}"
    return "×".join(map(str, extents))
