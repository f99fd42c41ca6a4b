"""The two U-Nets: the classic one, and one that needs as much memory as theirs did."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mural.graph import Graph, capture
from mural.models import UNet


@dataclass(frozen=True)
class Net:
    """A U-Net by its arguments, and where its graph is captured for predictions."""

    name: str
    width: int
    depth: int
    convs: int
    words: str
    side: int = 512

    def build(self) -> nn.Module:
        """The model, the same on every rank, on the current default device."""
        torch.manual_seed(0)
        return UNet(width=self.width, depth=self.depth, convs=self.convs)

    def meta(self) -> nn.Module:
        """The model without memory."""
        with torch.device("meta"):
            return self.build()

    def graph(self, side: int | None = None) -> Graph:
        """The graph of one image."""
        side = side or self.side
        return capture(self.meta(), (1, 3, side, side))


NETS = {
    net.name: net
    for net in (
        Net("classic", 64, 4, 2, "the classic U-Net: width 64, depth 4, two convolutions a block, BatchNorm"),
        Net("deep", 160, 3, 8, "a U-Net that first fails at 640² on one rank: width 160, depth 3, eight convolutions"),
        Net("toy", 4, 2, 2, "a toy", side=64),
    )
}
