"""DenseNet for images, in three published depths, with torchvision's layers and parameter names.

Huang, Liu, van der Maaten and Weinberger, "Densely connected convolutional networks", 2016 (DenseNet-BC): each
layer reads all layers before it in its block and adds `growth` channels to them; a transition between two
blocks halves channels and extents.

    block    x0 ─ layer ─ x1 ─ layer ─ x2 …      layer i reads x0, x1, …, xi side by side

A state dict of torchvision's model of that depth loads as it is.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.models.checked_arguments import check_image, check_positive, check_rate
from mural.models.layers_by_dims import dropout

# Depth → how many layers each of the four blocks has.
DEPTHS: Mapping[int, tuple[int, int, int, int]] = {
    121: (6, 12, 24, 16),
    169: (6, 12, 32, 32),
    201: (6, 12, 48, 32),
}


class Layer(nn.Module):
    """`growth` new channels from all channels so far, by convolutions k1 and k3, each after norm and ReLU."""

    def __init__(self, inputs: int, growth: int, bottleneck: int, rate: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, bottleneck * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False)
        self.dropout = dropout(rate)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        narrow = self.conv1(self.relu1(self.norm1(torch.cat(list(features), 1))))
        return self.dropout(self.conv2(self.relu2(self.norm2(narrow))))


class Block(nn.Module):
    """Layers that each read all before them; what comes out is everything, side by side."""

    def __init__(self, inputs: int, layers: int, growth: int, bottleneck: int, rate: float) -> None:
        super().__init__()
        for index in range(layers):
            self.add_module(f"denselayer{index + 1}", Layer(inputs + index * growth, growth, bottleneck, rate))

    def forward(self, image: Tensor) -> Tensor:
        features = [image]
        for layer in self.children():
            features.append(layer(features))
        return torch.cat(features, 1)


def transition(inputs: int, outputs: int) -> nn.Sequential:
    """Norm, ReLU, convolution k1 and a mean pool: fewer channels at half the extents."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            norm=nn.BatchNorm2d(inputs),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(inputs, outputs, 1, bias=False),
            pool=nn.AvgPool2d(2),
        )
    )


class DenseNet(nn.Module):
    """Class scores of each image; `blocks` gives the number of layers of each block, by default DenseNet-121's.

    >>> DenseNet(classes=7, width=4, growth=2, blocks=(2, 3))(torch.zeros(2, 3, 33, 47)).shape
    torch.Size([2, 7])
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 1000,
        width: int = 64,
        growth: int = 32,
        blocks: Sequence[int] = DEPTHS[121],
        bottleneck: int = 4,
        dropout: float = 0.0,
    ) -> None:
        """Builds a stem of `width` channels, then the blocks; convolutions k1 keep `bottleneck` × growth channels."""
        super().__init__()
        check_positive("DenseNet", in_channels=in_channels, classes=classes, width=width, growth=growth)
        check_positive("DenseNet", bottleneck=bottleneck, blocks=len(blocks))
        check_positive("DenseNet", **{f"blocks[{index}]": layers for index, layers in enumerate(blocks)})
        check_rate("DenseNet", dropout=dropout)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False),
            norm0=nn.BatchNorm2d(width),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(3, stride=2, padding=1),
        )
        channels = width
        for number, count in enumerate(blocks, 1):
            layers[f"denseblock{number}"] = Block(channels, count, growth, bottleneck, dropout)
            channels += count * growth
            if number < len(blocks):
                layers[f"transition{number}"] = transition(channels, channels // 2)
                channels //= 2
        # torchvision's name, whatever the number of blocks.
        layers["norm5"] = nn.BatchNorm2d(channels)

        self.in_channels = in_channels
        # The stem quarters an extent, rounding up; a transition halves it, rounding down.
        self.smallest = 4 * 2 ** (len(blocks) - 1) - 3
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        check_image("DenseNet", image.shape, self.in_channels, dims=2, smallest=self.smallest)
        features = F.relu(self.features(image), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(features, 1), 1))


def densenet121(
    in_channels: int = 3, classes: int = 1000, width: int = 64, growth: int = 32, dropout: float = 0.0
) -> DenseNet:
    """DenseNet-121: 8.0 million parameters at width 64 and growth 32."""
    return DenseNet(in_channels, classes, width, growth, DEPTHS[121], dropout=dropout)


def densenet169(
    in_channels: int = 3, classes: int = 1000, width: int = 64, growth: int = 32, dropout: float = 0.0
) -> DenseNet:
    """DenseNet-169: 14.1 million parameters at width 64 and growth 32."""
    return DenseNet(in_channels, classes, width, growth, DEPTHS[169], dropout=dropout)


def densenet201(
    in_channels: int = 3, classes: int = 1000, width: int = 64, growth: int = 32, dropout: float = 0.0
) -> DenseNet:
    """DenseNet-201: 20.0 million parameters at width 64 and growth 32."""
    return DenseNet(in_channels, classes, width, growth, DEPTHS[201], dropout=dropout)
