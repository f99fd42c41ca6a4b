"""ResNet v2 for small images: residual units that normalize before they convolve, at depths of 9 n + 2.

He, Zhang, Ren and Sun, "Identity mappings in deep residual networks", 2016: three stages of n units, and each
unit adds three convolutions (k1, k3, k1) to what passes by untouched, through a thousand layers if need be.

    image ─ stem ─ stage 0 ─ stage 1 (half the extents) ─ stage 2 (a quarter) ─ norm · ReLU ─ mean ─ scores

    unit       x ─┬─ norm · ReLU ─┬─ conv k1 ─ norm · ReLU ─ conv k3 ─ norm · ReLU ─ conv k1 ─ + ─
                  └───────────────┴──────────── shortcut ──────────────────────────────────────┘

Two published forms go by the name; `variant` chooses:

- "paper": the k3 convolutions have a quarter of the unit's channels; where the shape changes, the shortcut
  projects the activated input. Depth 1001 has 10.3 million parameters.
- "keras": the example `cifar10_resnet` of Keras, on which GEMS measures. From stage 1 on its k3 convolutions have
  half the unit's channels, convolutions have biases, and the shortcut projects the raw input. Depth 1001
  has 30.3 million parameters.

Extents need not be 32: the mean is taken over all positions that are left.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mural.models.checked_arguments import check_choice, check_image, check_positive

Form = Literal["paper", "keras"]


@dataclass(frozen=True)
class Variant:
    """What the two published forms differ in."""

    # Channels of the k3 convolutions per stage, in multiples of the width.
    bottlenecks: tuple[int, int, int]
    bias: bool
    projects_raw: bool


VARIANTS: Mapping[Form, Variant] = {
    "paper": Variant((1, 2, 4), bias=False, projects_raw=False),
    "keras": Variant((1, 4, 8), bias=True, projects_raw=True),
}

# Channels that leave the units of each stage, in multiples of the width.
OUTPUTS = (4, 8, 16)


def blocks_of(depth: int) -> int:
    """The number of units in each of the three stages.

    >>> blocks_of(110), blocks_of(1001)
    (12, 111)
    """
    blocks, rest = divmod(depth - 2, 9)
    if rest or blocks < 1:
        nearest = 9 * max(1, round((depth - 2) / 9)) + 2
        raise ValueError(
            f"ResNetV2 got depth={depth}, but depth is 9 n + 2 for an n of at least 1 (11, 20, …, 110, …, 1001): "
            f"set depth={nearest}"
        )
    return blocks


class Unit(nn.Module):
    """Three convolutions, each after norm and ReLU, added to the input, which k1 fits to the shape if it must."""

    def __init__(
        self, inputs: int, bottleneck: int, outputs: int, stride: int, variant: Variant, first: bool = False
    ) -> None:
        super().__init__()
        bias = variant.bias
        # The stem ends in norm and ReLU, so the first unit has none of its own (an empty Sequential is the identity).
        self.enter = nn.Sequential(*(() if first else (nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))))
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, bottleneck, 1, stride=stride, bias=bias),
            nn.BatchNorm2d(bottleneck),
            nn.ReLU(inplace=True),
            nn.Conv2d(bottleneck, bottleneck, 3, padding=1, bias=bias),
            nn.BatchNorm2d(bottleneck),
            nn.ReLU(inplace=True),
            nn.Conv2d(bottleneck, outputs, 1, bias=bias),
        )
        fits = inputs == outputs and stride == 1
        self.shortcut = None if fits else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=bias)
        self.projects_raw = variant.projects_raw

    def forward(self, features: Tensor) -> Tensor:
        entered: Tensor = self.enter(features)
        if self.shortcut is None:
            return features + self.branch(entered)
        return self.shortcut(features if self.projects_raw else entered) + self.branch(entered)


class ResNetV2(nn.Module):
    """Class scores of each image; depth is 9 n + 2, width the stem's channels.

    >>> ResNetV2(20, classes=7, width=2)(torch.zeros(2, 3, 19, 34)).shape
    torch.Size([2, 7])
    """

    def __init__(
        self, depth: int = 110, in_channels: int = 3, classes: int = 10, width: int = 16, variant: Form = "paper"
    ) -> None:
        """Builds three stages; the second and third halve the extents, rounding up."""
        super().__init__()
        check_positive("ResNetV2", depth=depth, in_channels=in_channels, classes=classes, width=width)
        check_choice("ResNetV2", "variant", variant, tuple(VARIANTS))
        blocks, form = blocks_of(depth), VARIANTS[variant]

        def stage(index: int) -> nn.Sequential:
            outputs, bottleneck = width * OUTPUTS[index], width * form.bottlenecks[index]
            inputs, stride = (width, 1) if index == 0 else (width * OUTPUTS[index - 1], 2)
            rest = (Unit(outputs, bottleneck, outputs, 1, form) for _ in range(blocks - 1))
            return nn.Sequential(Unit(inputs, bottleneck, outputs, stride, form, first=index == 0), *rest)

        self.in_channels = in_channels
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=form.bias), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.stages = nn.Sequential(*(stage(index) for index in range(len(OUTPUTS))))
        self.norm = nn.Sequential(nn.BatchNorm2d(width * OUTPUTS[-1]), nn.ReLU(inplace=True))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width * OUTPUTS[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        check_image("ResNetV2", image.shape, self.in_channels, dims=2)
        features = self.norm(self.stages(self.stem(image)))
        return self.fc(torch.flatten(self.avgpool(features), 1))


def resnet_v2(
    depth: int = 110, in_channels: int = 3, classes: int = 10, width: int = 16, variant: Form = "paper"
) -> ResNetV2:
    """ResNet v2 of a depth of 9 n + 2."""
    return ResNetV2(depth, in_channels, classes, width, variant)


def resnet110_v2(in_channels: int = 3, classes: int = 10, width: int = 16, variant: Form = "paper") -> ResNetV2:
    """ResNet-110 v2: 1.1 million parameters at width 16, 3.3 million in Keras' form."""
    return ResNetV2(110, in_channels, classes, width, variant)


def resnet1001_v2(in_channels: int = 3, classes: int = 10, width: int = 16, variant: Form = "paper") -> ResNetV2:
    """ResNet-1001 v2: 10.3 million parameters at width 16, 30.3 million in Keras' form."""
    return ResNetV2(1001, in_channels, classes, width, variant)
