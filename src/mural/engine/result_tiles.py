"""Results tile by tile: what a streamed model gives of images whose result is not held whole by any rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mural.geometry import Box


@dataclass(frozen=True)
class ResultTile:
    """A box of a model's result, as a plain tensor on the model's device.

    `box` has one interval for each dim of the whole result: images, channels, and where. `target` is what the loss
    compares the box with: the same images and place of the masks (which may have no channels), or their labels.
    """

    output: Tensor
    target: Tensor | None
    box: Box


@runtime_checkable
class ResultSink(Protocol):
    """Takes the result of a batch tile by tile: every position comes once, in one tile on one rank."""

    def begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Learn the shape and type of the whole result; called once on every rank, before the first tile of any.

        It may be collective.
        """
        ...

    def take(self, tile: ResultTile) -> None:
        """Take a tile; called on the rank that computed it, without any other."""
        ...
