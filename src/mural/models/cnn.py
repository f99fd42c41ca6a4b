"""A vanilla convolutional network, the same for signals, images and volumes: CNN1D, CNN2D and CNN3D.

The paper that these come from (`002`, section 2: BigConv) names them and gives no layers. The choice here,
for `depth` levels of which each has half the extents and twice the channels of the one before:

    level 0             conv k3 (in_channels → width) · ReLU
    level 1             max-pool 2 · conv k3 (width → 2 width) · ReLU
    level 2             max-pool 2 · conv k3 (2 width → 4 width) · ReLU     … up to level depth - 1
    head "image"        mean over all positions · linear → classes          one answer per image
    head "positions"    conv k1 → classes                                   one per position of the last level
"""

from typing import ClassVar, Literal

from torch import Tensor, nn

from mural.models.checked_arguments import check_choice, check_image, check_positive
from mural.models.layers_by_dims import LAYERS, Layers

Head = Literal["image", "positions"]


def level(layers: Layers, index: int, in_channels: int, width: int) -> nn.Sequential:
    """The layers of one level: every level but the first starts by halving the extents."""
    outputs = width * 2**index
    if index == 0:
        return nn.Sequential(layers.conv(in_channels, outputs, 3, padding=1), nn.ReLU())
    return nn.Sequential(layers.max_pool(2), layers.conv(outputs // 2, outputs, 3, padding=1), nn.ReLU())


class CNN(nn.Module):
    """Class scores of each image, or of each position, by a stack of convolutions; a subclass sets dims."""

    dims: ClassVar[int]

    def __init__(
        self, in_channels: int = 3, classes: int = 10, width: int = 32, depth: int = 3, head: Head = "image"
    ) -> None:
        """Builds `depth` levels on `width` channels; each extent must be at least 2**(depth - 1)."""
        super().__init__()
        name = type(self).__name__
        check_positive(name, in_channels=in_channels, classes=classes, width=width, depth=depth)
        check_choice(name, "head", head, ("image", "positions"))
        layers = LAYERS[self.dims]
        last = width * 2 ** (depth - 1)
        self.in_channels = in_channels
        self.smallest = 2 ** (depth - 1)
        self.levels = nn.Sequential(*(level(layers, index, in_channels, width) for index in range(depth)))
        self.head = (
            nn.Sequential(layers.mean(1), nn.Flatten(), nn.Linear(last, classes))
            if head == "image"
            else nn.Sequential(layers.conv(last, classes, 1))
        )

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes), or (batch, classes, *extents // 2**(depth - 1))."""
        check_image(type(self).__name__, image.shape, self.in_channels, self.dims, self.smallest)
        return self.head(self.levels(image))


class CNN1D(CNN):
    """The vanilla network on signals (batch, channels, length).

    >>> import torch
    >>> CNN1D(in_channels=1, classes=4, width=2)(torch.zeros(2, 1, 33)).shape
    torch.Size([2, 4])
    """

    dims = 1


class CNN2D(CNN):
    """The vanilla network on images (batch, channels, height, width).

    >>> import torch
    >>> CNN2D(classes=4, width=2, head="positions")(torch.zeros(1, 3, 32, 21)).shape
    torch.Size([1, 4, 8, 5])
    """

    dims = 2


class CNN3D(CNN):
    """The vanilla network on volumes (batch, channels, depth, height, width).

    >>> import torch
    >>> CNN3D(in_channels=1, classes=4, width=2)(torch.zeros(1, 1, 8, 9, 7)).shape
    torch.Size([1, 4])
    """

    dims = 3
