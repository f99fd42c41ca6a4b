"""AlexNet for images, with torchvision's layers and parameter names.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: the network of 2012 for a
single device. A state dict of torchvision's model loads as it is.
"""

import torch
from torch import Tensor, nn

from mural.models.checked_arguments import check_image, check_positive, check_rate

# Channels of the five convolutions and of the linear layers, in multiples of the width.
CHANNELS = (1, 3, 6, 4, 4)
CLASSIFIER = 64

# Positions per dim that the linear layers see, and the smallest image that leaves one.
POSITIONS = 6
SMALLEST = 63


class AlexNet(nn.Module):
    """Class scores of each image; width 64 gives the published 61.1 million parameters.

    >>> AlexNet(classes=7, width=2)(torch.zeros(2, 3, 65, 97)).shape
    torch.Size([2, 7])
    """

    def __init__(self, in_channels: int = 3, classes: int = 1000, width: int = 64, dropout: float = 0.5) -> None:
        """Builds five convolutions and three linear layers, with `dropout` before the first two of those."""
        super().__init__()
        check_positive("AlexNet", in_channels=in_channels, classes=classes, width=width)
        check_rate("AlexNet", dropout=dropout)
        first, second, third, fourth, last = (width * multiple for multiple in CHANNELS)
        hidden = width * CLASSIFIER
        self.in_channels = in_channels
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, first, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(first, second, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(second, third, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(third, fourth, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(fourth, last, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(POSITIONS)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(last * POSITIONS**2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        check_image("AlexNet", image.shape, self.in_channels, dims=2, smallest=SMALLEST)
        return self.classifier(torch.flatten(self.avgpool(self.features(image)), 1))


def alexnet(in_channels: int = 3, classes: int = 1000, width: int = 64, dropout: float = 0.5) -> AlexNet:
    """AlexNet: 61.1 million parameters at width 64."""
    return AlexNet(in_channels, classes, width, dropout)
