"""U-Net in 1, 2 or 3 dims: features go down level by level, come up again, and meet their own level's skip.

Ronneberger, Fischer and Brox, 2015, for depth 2 (the classic has width 64 and depth 4):

    image ─ stem ─────────────── skip ─────────────── up.1 ─ head ─ scores     width
              └─ down.0 ──────── skip ──── up.0 ──────┘                        2 width, half the extents
                    └─ down.1 ─────────────┘                                   4 width, a quarter

Convolutions are padded to keep their extents, so scores have the extents of the image. Where halving left a
remainder, what comes up is interpolated to the extents of the skip.

What comes up must halve its channels, so that half of the joined channels are the skip's. `upsample` says how:

- "transposed", "interpolate": a layer between the levels does, learned or before interpolation.
- "repeat": the blocks do. The lowest ends with the channels of the level above, each block that meets a skip
  with half its level's, the last with width / 2. torchgpipe's U-Net (B, C) is this form with depth=5, convs=B,
  width=C, without biases and with instance norms: (6, 72) has 362.2 million parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from mural.models.checked_arguments import check_choice, check_image, check_positive
from mural.models.layers_by_dims import LAYERS, NORMS, Layers, Norm, conv_norm

Block = Literal["plain", "residual"]
Upsample = Literal["transposed", "interpolate", "repeat"]


def chain(layers: Layers, norm: Norm | None, channels: Sequence[int]) -> list[nn.Module]:
    """Convolutions k3 with their norms from each number of channels to the next, and a ReLU between two of them."""
    steps = [conv_norm(layers, norm, inputs, outputs, kernel=3) for inputs, outputs in pairwise(channels)]
    return [*steps[0], *(layer for step in steps[1:] for layer in (nn.ReLU(inplace=True), *step))]


def plain(layers: Layers, norm: Norm | None, channels: Sequence[int]) -> nn.Module:
    """Convolution, norm, ReLU, repeated: the block of the classic U-Net has two."""
    return nn.Sequential(*chain(layers, norm, channels), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Convolutions added to their input, which a convolution k1 fits to the channels if it must."""

    def __init__(self, layers: Layers, norm: Norm | None, channels: Sequence[int]) -> None:
        super().__init__()
        inputs, outputs = channels[0], channels[-1]
        self.branch = nn.Sequential(*chain(layers, norm, channels))
        # An empty Sequential is the identity.
        self.shortcut = nn.Sequential(*(() if inputs == outputs else conv_norm(layers, norm, inputs, outputs, 1)))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: Tensor) -> Tensor:
        return self.relu(self.branch(features) + self.shortcut(features))


@dataclass(frozen=True)
class Rise:
    """What enlarges between two levels, and whether the blocks give channels away in its place."""

    enlarge: Callable[[Layers, int, int], nn.Module]
    blocks_narrow: bool = False


BLOCKS: Mapping[Block, Callable[[Layers, Norm | None, Sequence[int]], nn.Module]] = {
    "plain": plain,
    "residual": Residual,
}
RISES: Mapping[Upsample, Rise] = {
    # Each position becomes 2 per dim, learned.
    "transposed": Rise(lambda layers, inputs, outputs: layers.transposed(inputs, outputs, 2, stride=2)),
    # Channels change before interpolation: k1 commutes with it, and is cheaper there.
    "interpolate": Rise(lambda layers, inputs, outputs: layers.conv(inputs, outputs, 1)),
    # Each position becomes 2 per dim, without parameters.
    "repeat": Rise(lambda *_: nn.Upsample(scale_factor=2), blocks_narrow=True),
}


def narrowing(rise: Rise, width: int) -> int:
    """How many times fewer channels a block that goes up ends with; raises ValueError for a width it cannot divide."""
    if rise.blocks_narrow and width % 2:
        raise ValueError(f'UNet got width={width}, but upsample="repeat" halves it: set width={width + 1}')
    return 2 if rise.blocks_narrow else 1


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
        convs: int = 2,
    ) -> None:
        """Builds `depth` levels below the first, `convs` convolutions a block; each extent is at least 2**depth."""
        super().__init__()
        check_choice("UNet", "dims", dims, tuple(LAYERS))
        check_positive("UNet", in_channels=in_channels, classes=classes, width=width, depth=depth, convs=convs)
        check_choice("UNet", "norm", norm, (*NORMS, None))
        check_choice("UNet", "block", block, tuple(BLOCKS))
        check_choice("UNet", "upsample", upsample, tuple(RISES))
        layers, rise = LAYERS[dims], RISES[upsample]
        narrow = narrowing(rise, width)
        # (upper, lower) channels for each step between two levels, from the top to the bottom.
        steps = list(pairwise(width * 2**level for level in range(depth + 1)))
        ends = [lower for _, lower in steps[:-1]] + [steps[-1][1] // narrow]

        def build(inputs: int, hidden: int, outputs: int) -> nn.Module:
            return BLOCKS[block](layers, norm, [inputs, *[hidden] * (convs - 1), outputs])

        self.dims, self.in_channels, self.smallest = dims, in_channels, 2**depth
        self.stem = build(in_channels, width, width)
        self.down = nn.ModuleList(
            nn.Sequential(layers.max_pool(2), build(upper, lower, end))
            for (upper, lower), end in zip(steps, ends, strict=True)
        )
        self.up = nn.ModuleList(
            Up(layers, rise.enlarge(layers, lower, upper), build(2 * upper, upper // narrow, upper // narrow))
            for upper, lower in reversed(steps)
        )
        self.head = layers.conv(width // narrow, classes, 1)

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
