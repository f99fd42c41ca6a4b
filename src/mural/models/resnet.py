"""ResNet for images, in the five published depths, with torchvision's layers and parameter names.

He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2015; as in torchvision, the stride of
a bottleneck sits on its 3×3 convolution. A state dict of torchvision's model of that depth loads as it is.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from mural.models.checked_arguments import check_choice, check_image, check_positive


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that divides extents by its stride, rounding up; a norm follows, so it has no bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """A branch of convolutions added to its input, which a convolution k1 fits to the shape if it must."""

    expansion: ClassVar[int]

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            None
            if stride == 1 and inputs == outputs
            else nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        )

    def branch(self, features: Tensor) -> Tensor:
        """What the block adds to its input."""
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        identity: Tensor = features if self.downsample is None else self.downsample(features)
        return self.relu(self.branch(features) + identity)


class Basic(Block):
    """Two convolutions k3: the block of ResNet-18 and 34."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width * self.expansion, stride)
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)

    def branch(self, features: Tensor) -> Tensor:
        features = self.relu(self.bn1(self.conv1(features)))
        return self.bn2(self.conv2(features))


class Bottleneck(Block):
    """Convolutions k1, k3, k1, the last to four times the channels: the block of ResNet-50, 101 and 152."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width * self.expansion, stride)
        self.conv1 = conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)

    def branch(self, features: Tensor) -> Tensor:
        features = self.relu(self.bn1(self.conv1(features)))
        features = self.relu(self.bn2(self.conv2(features)))
        return self.bn3(self.conv3(features))


# Depth → the block, and how many of them each of the four layers has.
DEPTHS: Mapping[int, tuple[type[Basic] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (Basic, (2, 2, 2, 2)),
    34: (Basic, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """Class scores of each image; depth is one of 18, 34, 50, 101, 152, width the first layer's channels.

    >>> ResNet(18, classes=7, width=4)(torch.zeros(2, 3, 33, 47)).shape
    torch.Size([2, 7])
    """

    def __init__(self, depth: int = 50, in_channels: int = 3, classes: int = 1000, width: int = 64) -> None:
        """Builds the four layers, each of half the extents and twice the channels of the one before."""
        super().__init__()
        check_choice("ResNet", "depth", depth, tuple(DEPTHS))
        check_positive("ResNet", in_channels=in_channels, classes=classes, width=width)
        block, blocks = DEPTHS[depth]

        def layer(index: int) -> nn.Sequential:
            outputs = width * 2**index
            # The stem leaves `width` channels and has halved the extents: the first layer keeps them.
            inputs, stride = (width, 1) if index == 0 else (outputs // 2 * block.expansion, 2)
            rest = (block(outputs * block.expansion, outputs, 1) for _ in range(blocks[index] - 1))
            return nn.Sequential(block(inputs, outputs, stride), *rest)

        self.in_channels = in_channels
        self.conv1 = conv(in_channels, width, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = layer(0)
        self.layer2 = layer(1)
        self.layer3 = layer(2)
        self.layer4 = layer(3)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width * 8 * block.expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        check_image("ResNet", image.shape, self.in_channels, dims=2)
        features: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.fc(torch.flatten(self.avgpool(features), 1))


def resnet18(in_channels: int = 3, classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-18: 11.7 million parameters at width 64."""
    return ResNet(18, in_channels, classes, width)


def resnet34(in_channels: int = 3, classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-34: 21.8 million parameters at width 64."""
    return ResNet(34, in_channels, classes, width)


def resnet50(in_channels: int = 3, classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-50: 25.6 million parameters at width 64."""
    return ResNet(50, in_channels, classes, width)


def resnet101(in_channels: int = 3, classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-101: 44.5 million parameters at width 64."""
    return ResNet(101, in_channels, classes, width)


def resnet152(in_channels: int = 3, classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-152: 60.2 million parameters at width 64."""
    return ResNet(152, in_channels, classes, width)
