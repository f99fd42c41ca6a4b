"""Networks for digits: the perceptron of document `003` and the LeNet-5 of document `004`.

The perceptron has an input, two hidden layers and scores. The document fixes 784 inputs and 10 classes (MNIST), takes
sigmoids (Genann's activation) and varies the second hidden layer to make messages larger: `second` is that breadth.
It gives no numbers for the hidden layers; 100 each is the choice here.

    image ─ flatten ─ linear (784 → first) · sigmoid ─ linear (first → second) · sigmoid ─ linear → classes

Genann ends in a sigmoid too; here scores come out, as every loss of torch wants them.

LeNet-5 has two convolutions with their pools, then three linear layers. LeCun, Bottou, Bengio and Haffner,
"Gradient-based learning applied to document recognition", 1998, as it is written today: every map of the second
convolution sees all of the first's, and pools learn nothing. The document counts what flows between its layers (1,790
numbers) against what they hold, to find which kind of parallelism sends less; its «up to 35 nodes» is 61,706 / 1,790:

    layer                                 kept    parameters
    conv k5 (1 → 6) · tanh · mean 2       1,176          156
    conv k5 (6 → 16) · tanh · mean 2        400        2,416
    linear (400 → 120) · tanh               120       48,120
    linear (120 → 84) · tanh                 84       10,164
    linear (84 → 10)                         10          850
                                          1,790       61,706
"""

from math import prod

from torch import Tensor, nn

from mural.models.checked_arguments import check_image, check_positive


class Perceptron(nn.Module):
    """Class scores of each image by linear layers alone; 89,610 parameters as it stands.

    >>> import torch
    >>> Perceptron(second=16)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, inputs: int = 784, first: int = 100, second: int = 100, classes: int = 10) -> None:
        """Builds the layers for images of `inputs` numbers, channels included."""
        super().__init__()
        check_positive("Perceptron", inputs=inputs, first=first, second=second, classes=classes)
        self.inputs = inputs
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs, first),
            nn.Sigmoid(),
            nn.Linear(first, second),
            nn.Sigmoid(),
            nn.Linear(second, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        found = prod(image.shape[1:])
        if found != self.inputs:
            raise ValueError(
                f"Perceptron got {found} numbers per image in shape {tuple(image.shape)}, but was built for "
                f"{self.inputs}: build it with inputs={found}"
            )
        return self.layers(image)


def kept(extent: int) -> int:
    """What two convolutions k5 without padding, each with a pool that halves, leave of an extent.

    >>> kept(32)
    5
    """
    return ((extent - 4) // 2 - 4) // 2


class LeNet5(nn.Module):
    """Class scores of each image of fixed extents; 61,706 parameters for digits of 32 × 32.

    >>> import torch
    >>> LeNet5()(torch.zeros(2, 1, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, in_channels: int = 1, classes: int = 10, extents: tuple[int, int] = (32, 32)) -> None:
        """Builds the layers for images of these extents, each at least 16: the first linear layer sees them all."""
        super().__init__()
        height, width = extents
        check_positive("LeNet5", in_channels=in_channels, classes=classes, height=height, width=width)
        if min(extents) < 16:
            larger = (max(height, 16), max(width, 16))
            raise ValueError(f"LeNet5 got extents={extents}, but each is at least 16: set extents={larger}")
        self.in_channels = in_channels
        self.extents = (height, width)
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * kept(height) * kept(width), 120),
            nn.Tanh(),
            nn.Linear(120, 84),
            nn.Tanh(),
            nn.Linear(84, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        check_image("LeNet5", image.shape, self.in_channels, dims=2)
        found = tuple(image.shape[2:])
        if found != self.extents:
            raise ValueError(f"LeNet5 got extents {found}, but has {self.extents}: build it with extents={found}")
        return self.classifier(self.features(image))
