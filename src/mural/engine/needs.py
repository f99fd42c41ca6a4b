"""What a rank needs of every batch: the image, the target, both or nothing, and over which ranks they are cut."""

from __future__ import annotations

from dataclasses import dataclass

from mural.ranks import Mesh


@dataclass(frozen=True)
class Needs:
    """Whether a rank takes images and targets of batches that are cut over `mesh`: the run's, or that of its stages."""

    mesh: Mesh
    image: bool = True
    target: bool = True
