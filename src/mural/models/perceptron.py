"""The perceptron of four layers that document `003` trains on digits: input, two hidden layers, scores.

The document fixes 784 inputs and 10 classes (MNIST), takes sigmoids (Genann's activation) and varies the
second hidden layer to make messages larger: `second` is that breadth. It gives no numbers for the
hidden layers; 100 each is the choice here.

    image ─ flatten ─ linear (784 → first) · sigmoid ─ linear (first → second) · sigmoid ─ linear → classes

Genann ends in a sigmoid too; here scores come out, as every loss of torch wants them.
"""

from math import prod

from torch import Tensor, nn

from mural.models.checked_arguments import check_positive


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
