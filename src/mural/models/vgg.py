"""VGG for images, in the four published depths, with torchvision's layers and parameter names.

Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2014. A state dict
of torchvision's model of that depth, with norms or without, loads as it is.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from mural.models.checked_arguments import check_choice, check_image, check_positive, check_rate

# Depth → how many convolutions each of the five stages has; three linear layers make up the rest.
DEPTHS: Mapping[int, tuple[int, int, int, int, int]] = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}

# Channels of the stages and of the linear layers, in multiples of the width.
CHANNELS = (1, 2, 4, 8, 8)
CLASSIFIER = 64

# Positions per dim that the linear layers see, and the smallest image that leaves one.
POSITIONS = 7
SMALLEST = 2 ** len(CHANNELS)


def stage(inputs: int, outputs: int, convolutions: int, batch_norm: bool) -> list[nn.Module]:
    """Convolutions k3, each with its norm (if any) and ReLU, then a pool that halves the extents."""
    stack: list[nn.Module] = []
    for before, after in pairwise([inputs] + [outputs] * convolutions):
        norm = [nn.BatchNorm2d(after)] if batch_norm else []
        stack += [nn.Conv2d(before, after, 3, padding=1), *norm, nn.ReLU(inplace=True)]
    return [*stack, nn.MaxPool2d(2)]


class VGG(nn.Module):
    """Class scores of each image; depth is one of 11, 13, 16, 19, width the first stage's channels.

    >>> VGG(11, classes=7, width=2)(torch.zeros(2, 3, 33, 47)).shape
    torch.Size([2, 7])
    """

    def __init__(
        self,
        depth: int = 19,
        in_channels: int = 3,
        classes: int = 1000,
        width: int = 64,
        batch_norm: bool = False,
        dropout: float = 0.5,
    ) -> None:
        """Builds five stages and three linear layers, with `dropout` after the first two of those."""
        super().__init__()
        check_choice("VGG", "depth", depth, tuple(DEPTHS))
        check_positive("VGG", in_channels=in_channels, classes=classes, width=width)
        check_rate("VGG", dropout=dropout)
        channels = [in_channels, *(width * multiple for multiple in CHANNELS)]
        hidden = width * CLASSIFIER
        stages = (
            stage(inputs, outputs, convolutions, batch_norm)
            for (inputs, outputs), convolutions in zip(pairwise(channels), DEPTHS[depth], strict=True)
        )
        self.in_channels = in_channels
        self.features = nn.Sequential(*(layer for layers in stages for layer in layers))
        self.avgpool = nn.AdaptiveAvgPool2d(POSITIONS)
        self.classifier = nn.Sequential(
            nn.Linear(channels[-1] * POSITIONS**2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        self.initialize()

    def initialize(self) -> None:
        """Draws the weights as torchvision does."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        check_image("VGG", image.shape, self.in_channels, dims=2, smallest=SMALLEST)
        return self.classifier(torch.flatten(self.avgpool(self.features(image)), 1))


def vgg11(
    in_channels: int = 3, classes: int = 1000, width: int = 64, batch_norm: bool = False, dropout: float = 0.5
) -> VGG:
    """VGG-11: 132.9 million parameters at width 64."""
    return VGG(11, in_channels, classes, width, batch_norm, dropout)


def vgg13(
    in_channels: int = 3, classes: int = 1000, width: int = 64, batch_norm: bool = False, dropout: float = 0.5
) -> VGG:
    """VGG-13: 133.0 million parameters at width 64."""
    return VGG(13, in_channels, classes, width, batch_norm, dropout)


def vgg16(
    in_channels: int = 3, classes: int = 1000, width: int = 64, batch_norm: bool = False, dropout: float = 0.5
) -> VGG:
    """VGG-16: 138.4 million parameters at width 64."""
    return VGG(16, in_channels, classes, width, batch_norm, dropout)


def vgg19(
    in_channels: int = 3, classes: int = 1000, width: int = 64, batch_norm: bool = False, dropout: float = 0.5
) -> VGG:
    """VGG-19: 143.7 million parameters at width 64."""
    return VGG(19, in_channels, classes, width, batch_norm, dropout)
