"""U-Net in 1, 2 or 3 dims: features go down level by level, come up again, and meet their own level's skip.

Ronneberger, Fischer and Brox, 2015, for depth 2 (the classic has width 64 and depth 4):

    image ─ stem ─────────────── skip ─────────────── up.1 ─ head ─ scores     width
              └─ down.0 ──────── skip ──── up.0 ──────┘                        2 width, half the extents
                    └─ down.1 ─────────────┘                                   4 width, a quarter

Convolutions are padded to keep their extents, so scores have the extents of the image. Where halving left a
remainder, what comes up is interpolated to the extents of the skip.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from mural.models.arguments import check_choice, check_image, check_positive
from mural.models.layers import LAYERS, NORMS, Layers, Norm, conv_norm

Block = Literal["plain", "residual"]
Upsample = Literal["transposed", "interpolate"]


def pair(layers: Layers, norm: Norm | None, inputs: int, outputs: int) -> list[nn.Module]:
    """Two convolutions k3 with their norms, and a ReLU between them."""
    first = conv_norm(layers, norm, inputs, outputs, kernel=3)
    return [*first, nn.ReLU(inplace=True), *conv_norm(layers, norm, outputs, outputs, kernel=3)]


def plain(layers: Layers, norm: Norm | None, inputs: int, outputs: int) -> nn.Module:
    """Convolution, norm, ReLU, twice: the block of the classic U-Net."""
    return nn.Sequential(*pair(layers, norm, inputs, outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Two convolutions added to their input, which a convolution k1 fits to the channels if it must."""

    def __init__(self, layers: Layers, norm: Norm | None, inputs: int, outputs: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*pair(layers, norm, inputs, outputs))
        # An empty Sequential is the identity.
        self.shortcut = nn.Sequential(*(() if inputs == outputs else conv_norm(layers, norm, inputs, outputs, 1)))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: Tensor) -> Tensor:
        return self.relu(self.branch(features) + self.shortcut(features))


def transposed(layers: Layers, inputs: int, outputs: int) -> nn.Module:
    """A learned enlargement: each position becomes 2 per dim."""
    return layers.transposed(inputs, outputs, 2, stride=2)


def narrowed(layers: Layers, inputs: int, outputs: int) -> nn.Module:
    """The change of channels alone, before interpolation: k1 commutes with it, and is cheaper there."""
    return layers.conv(inputs, outputs, 1)


BLOCKS: Mapping[Block, Callable[[Layers, Norm | None, int, int], nn.Module]] = {
    "plain": plain,
    "residual": Residual,
}
UPSAMPLES: Mapping[Upsample, Callable[[Layers, int, int], nn.Module]] = {
    "transposed": transposed,
    "interpolate": narrowed,
}


class Up(nn.Module):
    """One level up: the coarse features enlarged to the skip's extents, joined to the skip, then a block."""

    def __init__(self, layers: Layers, enlarge: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.enlarge = enlarge
        self.block = block

    def forward(self, coarse: Tensor, skip: Tensor) -> Tensor:
        enlarged = self.layers.resize(self.enlarge(coarse), like=skip)
        return self.block(torch.cat([skip, enlarged], dim=1))


class UNet(nn.Module):
    """Class scores of each position of a signal, image or volume; by default the classic U-Net, with norms.

    >>> UNet(dims=3, in_channels=1, width=2, depth=2)(torch.zeros(1, 1, 8, 9, 11)).shape
    torch.Size([1, 2, 8, 9, 11])
    """

    def __init__(
        self,
        dims: int = 2,
        in_channels: int = 3,
        classes: int = 2,
        width: int = 64,
        depth: int = 4,
        norm: Norm | None = "batch",
        block: Block = "plain",
        upsample: Upsample = "transposed",
    ) -> None:
        """Builds `depth` levels below the first; each extent must be at least 2**depth."""
        super().__init__()
        check_choice("UNet", "dims", dims, tuple(LAYERS))
        check_positive("UNet", in_channels=in_channels, classes=classes, width=width, depth=depth)
        check_choice("UNet", "norm", norm, (*NORMS, None))
        check_choice("UNet", "block", block, tuple(BLOCKS))
        check_choice("UNet", "upsample", upsample, tuple(UPSAMPLES))
        layers = LAYERS[dims]
        build = partial(BLOCKS[block], layers, norm)
        enlarge = partial(UPSAMPLES[upsample], layers)
        # (upper, lower) channels for each step between two levels, from the top to the bottom.
        steps = list(pairwise(width * 2**level for level in range(depth + 1)))

        self.dims = dims
        self.in_channels = in_channels
        self.smallest = 2**depth
        self.stem = build(in_channels, width)
        self.down = nn.ModuleList(nn.Sequential(layers.max_pool(2), build(upper, lower)) for upper, lower in steps)
        self.up = nn.ModuleList(
            Up(layers, enlarge(lower, upper), build(2 * upper, upper)) for upper, lower in reversed(steps)
        )
        self.head = layers.conv(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes, *extents), at the image's own extents."""
        check_image("UNet", image.shape, self.in_channels, self.dims, self.smallest)
        features: Tensor = self.stem(image)
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(features)
            features = down(features)
        for up in self.up:
            features = up(features, skips.pop())
        return self.head(features)


UNet2D = partial(UNet, 2)
UNet3D = partial(UNet, 3)
