"""The fully convolutional network FCN-8s: a classifier scored at three scales, fused at the image's extents.

Long, Shelhamer and Darrell, "Fully convolutional networks for semantic segmentation", 2015, on VGG-16:

    image ─ stage 0 ─ stage 1 ─ stage 2 ─ stage 3 ─ stage 4 ─ conv k7 ─ conv k1
              /2        /4        /8 │      /16 │      /32                 │
                                  score      score                      score
                                     │          │                          │
    scores at image size ── up ×8 ── + ─ up ×2 ─ + ─────── up ×2 ──────────┘

Two choices differ from the paper's code. The convolutions are padded to keep their extents (there the image
is padded by 100 and the scores are cropped). Scores are enlarged by bilinear interpolation to the exact
extents wanted (there by transposed convolutions that start out as a bilinear interpolation).
Pools round up, as Caffe's do, so any extent of at least 1 works.
"""

from itertools import pairwise

from torch import Tensor, nn

from mural.models.checked_arguments import check_image, check_positive, check_rate
from mural.models.layers_by_dims import LAYERS

LAYERS_2D = LAYERS[2]

# VGG-16: how many convolutions each stage has, and its channels in multiples of the width.
CONVOLUTIONS = (2, 2, 3, 3, 3)
CHANNELS = (1, 2, 4, 8, 8)
CLASSIFIER = 64

# Scores are taken after the stages that divide the image by 8 and by 16, and after the classifier.
SKIPS = (2, 3)


def stage(inputs: int, outputs: int, convolutions: int) -> nn.Sequential:
    """One stage of VGG: convolutions k3 with ReLU, then a pool that halves the extents, rounding up."""
    stack: list[nn.Module] = []
    for before, after in pairwise([inputs] + [outputs] * convolutions):
        stack += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*stack, nn.MaxPool2d(2, ceil_mode=True))


class FCN2D(nn.Module):
    """Class scores of each pixel by FCN-8s; width 64 gives VGG-16's 134 million parameters.

    >>> import torch
    >>> FCN2D(classes=5, width=1)(torch.zeros(1, 3, 45, 67)).shape
    torch.Size([1, 5, 45, 67])
    """

    def __init__(self, in_channels: int = 3, classes: int = 21, width: int = 64, dropout: float = 0.5) -> None:
        """Builds VGG-16 with its channels scaled to `width`, and with `dropout` in its classifier."""
        super().__init__()
        check_positive("FCN2D", in_channels=in_channels, classes=classes, width=width)
        check_rate("FCN2D", dropout=dropout)
        channels = [width * multiple for multiple in CHANNELS]
        self.in_channels = in_channels
        self.stages = nn.ModuleList(
            stage(inputs, outputs, convolutions)
            for inputs, outputs, convolutions in zip([in_channels, *channels[:-1]], channels, CONVOLUTIONS, strict=True)
        )
        hidden = width * CLASSIFIER
        self.classifier = nn.Sequential(
            nn.Conv2d(channels[-1], hidden, 7, padding=3),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Conv2d(hidden, hidden, 1),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Conv2d(hidden, classes, 1),
        )
        self.scores = nn.ModuleList(nn.Conv2d(channels[index], classes, 1) for index in SKIPS)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes, height, width), at the image's own extents."""
        check_image("FCN2D", image.shape, self.in_channels, dims=2)
        features: list[Tensor] = [image]
        for each in self.stages:
            features.append(each(features[-1]))
        fused: Tensor = self.classifier(features[-1])
        for index, score in zip(reversed(SKIPS), reversed(self.scores), strict=True):
            finer: Tensor = score(features[index + 1])
            fused = finer + LAYERS_2D.resize(fused, like=finer)
        return LAYERS_2D.resize(fused, like=image)
