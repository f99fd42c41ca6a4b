"""One table gives torch's layers for 1, 2 and 3 spatial dims, so that a model is written once for all."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

Norm = Literal["batch", "instance", "group"]


@dataclass(frozen=True)
class Layers:
    """The layer classes of torch for one number of spatial dims."""

    conv: type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]
    transposed: type[nn.ConvTranspose1d] | type[nn.ConvTranspose2d] | type[nn.ConvTranspose3d]
    max_pool: type[nn.MaxPool1d] | type[nn.MaxPool2d] | type[nn.MaxPool3d]
    mean: type[nn.AdaptiveAvgPool1d] | type[nn.AdaptiveAvgPool2d] | type[nn.AdaptiveAvgPool3d]
    batch_norm: type[nn.BatchNorm1d] | type[nn.BatchNorm2d] | type[nn.BatchNorm3d]
    instance_norm: type[nn.InstanceNorm1d] | type[nn.InstanceNorm2d] | type[nn.InstanceNorm3d]
    interpolation: Literal["linear", "bilinear", "trilinear"]

    def resize(self, image: Tensor, like: Tensor) -> Tensor:
        """The image interpolated linearly to the spatial extents of `like`; itself where they are equal."""
        if image.shape[2:] == like.shape[2:]:
            return image
        return F.interpolate(image, size=like.shape[2:], mode=self.interpolation, align_corners=False)


LAYERS: Mapping[int, Layers] = {
    1: Layers(
        nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d,
        nn.BatchNorm1d, nn.InstanceNorm1d, "linear",
    ),
    2: Layers(
        nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d,
        nn.BatchNorm2d, nn.InstanceNorm2d, "bilinear",
    ),
    3: Layers(
        nn.Conv3d, nn.ConvTranspose3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d,
        nn.BatchNorm3d, nn.InstanceNorm3d, "trilinear",
    ),
}  # fmt: skip

NORMS: Mapping[Norm, Callable[[Layers, int], nn.Module]] = {
    "batch": lambda layers, channels: layers.batch_norm(channels),
    "instance": lambda layers, channels: layers.instance_norm(channels, affine=True),
    # Groups divide the channels: the largest number of them, up to 8 and a power of two, that does.
    "group": lambda _, channels: nn.GroupNorm(math.gcd(8, channels), channels),
}


def conv_norm(layers: Layers, norm: Norm | None, inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    """A convolution that keeps the extents, followed by its norm; without one the convolution has a bias.

    >>> [type(layer).__name__ for layer in conv_norm(LAYERS[2], "group", 3, 12, kernel=3)]
    ['Conv2d', 'GroupNorm']
    """
    conv = layers.conv(inputs, outputs, kernel, padding=kernel // 2, bias=norm is None)
    return [conv] if norm is None else [conv, NORMS[norm](layers, outputs)]
