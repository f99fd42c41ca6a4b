"""Inception-v3 for images, with torchvision's layers and parameter names.

Szegedy, Vanhoucke, Ioffe, Shlens and Wojna, "Rethinking the Inception architecture for computer vision", 2015:
blocks of branches side by side, of which some factor a k7 into 1 × 7 and 7 × 1. In training an auxiliary head
scores the features in the middle, as in torchvision. A state dict of torchvision's model loads as it is.

    image ─ stem /8 ─ 5b 5c 5d ─ 6a /16 ─ 6b 6c 6d 6e ─┬─ 7a /32 ─ 7b 7c ─ mean ─ scores
                                                       └─ mean 5 ─ conv k1 ─ conv k5 ─ mean ─ auxiliary scores
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.models.checked_arguments import check_image, check_positive, check_rate

Kernel = tuple[int, int]

# The published network: how many channels the first convolution has. Other widths scale all in proportion.
WIDTH = 32

# The smallest images that leave one position for the scores, and one for the auxiliary scores.
SMALLEST = 75
SMALLEST_WITH_AUX = 299


class InceptionOutputs(NamedTuple):
    """What a model with auxiliary head gives in training, under torchvision's names."""

    logits: Tensor
    aux_logits: Tensor


class Conv(nn.Module):
    """A convolution without bias, its norm and a ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | Kernel, stride: int = 1, padding: int | Kernel = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(features)), inplace=True)


class Step(NamedTuple):
    """One step of a branch: a convolution, or several side by side where there are several kernels."""

    outputs: int
    kernels: tuple[Kernel, ...]
    stride: int = 1


def step(outputs: int, *kernels: int | Kernel, stride: int = 1) -> Step:
    """A step of a branch; one number stands for a square kernel.

    >>> step(64, 3)
    Step(outputs=64, kernels=((3, 3),), stride=1)
    """
    return Step(outputs, tuple((kernel, kernel) if isinstance(kernel, int) else kernel for kernel in kernels), stride)


class Block(NamedTuple):
    """The branches of a block; beside them a mean pool with a k1 to `pool` channels, or a max pool that halves."""

    pool: int | None
    branches: Mapping[str, tuple[Step, ...]]


class Mixed(nn.Module):
    """Branches side by side on the same features, joined along the channels.

    Convolutions keep the extents; those with a stride halve them, without padding. Names are torchvision's:
    `branch`, or `branch_1`, `branch_2` for its steps, or `branch_2a`, `branch_2b` where it forks.
    """

    def __init__(self, inputs: int, block: Block, scaled: Callable[[int], int]) -> None:
        super().__init__()
        # For each branch, for each of its steps, the names of the convolutions.
        self.branches: list[list[list[str]]] = []
        self.outputs = inputs if block.pool is None else scaled(block.pool)
        for branch, steps in block.branches.items():
            channels, names = inputs, list[list[str]]()
            for number, each in enumerate(steps, 1):
                name = branch if len(steps) == 1 else f"{branch}_{number}"
                forks = len(each.kernels) > 1
                names.append([name + "ab"[index] * forks for index in range(len(each.kernels))])
                for label, (height, width) in zip(names[-1], each.kernels, strict=True):
                    padding = (height // 2, width // 2) if each.stride == 1 else 0
                    self.add_module(label, Conv(channels, scaled(each.outputs), (height, width), each.stride, padding))
                channels = scaled(each.outputs) * len(each.kernels)
            self.branches.append(names)
            self.outputs += channels
        self.branch_pool = None if block.pool is None else Conv(inputs, scaled(block.pool), 1)

    def forward(self, features: Tensor) -> Tensor:
        joined = [self.along(branch, features) for branch in self.branches]
        if self.branch_pool is None:
            return torch.cat([*joined, F.max_pool2d(features, 3, stride=2)], 1)
        return torch.cat([*joined, self.branch_pool(F.avg_pool2d(features, 3, stride=1, padding=1))], 1)

    def along(self, branch: list[list[str]], features: Tensor) -> Tensor:
        """The features after one branch."""
        for names in branch:
            found: list[Tensor] = [self.get_submodule(name)(features) for name in names]
            features = found[0] if len(found) == 1 else torch.cat(found, 1)
        return features


def mixed_5(pool: int) -> Block:
    """A block at an eighth of the extents."""
    return Block(
        pool,
        {
            "branch1x1": (step(64, 1),),
            "branch5x5": (step(48, 1), step(64, 5)),
            "branch3x3dbl": (step(64, 1), step(96, 3), step(96, 3)),
        },
    )


def mixed_6(inner: int) -> Block:
    """A block at a sixteenth of the extents, with `inner` channels inside its factored k7."""
    row, column = (1, 7), (7, 1)
    double = (step(inner, 1), step(inner, column), step(inner, row), step(inner, column), step(192, row))
    return Block(
        192,
        {
            "branch1x1": (step(192, 1),),
            "branch7x7": (step(inner, 1), step(inner, row), step(192, column)),
            "branch7x7dbl": double,
        },
    )


MIXED_6A = Block(
    None,
    {
        "branch3x3": (step(384, 3, stride=2),),
        "branch3x3dbl": (step(64, 1), step(96, 3), step(96, 3, stride=2)),
    },
)
MIXED_7A = Block(
    None,
    {
        "branch3x3": (step(192, 1), step(320, 3, stride=2)),
        "branch7x7x3": (step(192, 1), step(192, (1, 7)), step(192, (7, 1)), step(192, 3, stride=2)),
    },
)
MIXED_7 = Block(
    192,
    {
        "branch1x1": (step(320, 1),),
        "branch3x3": (step(384, 1), step(384, (1, 3), (3, 1))),
        "branch3x3dbl": (step(448, 1), step(384, 3), step(384, (1, 3), (3, 1))),
    },
)

BLOCKS: Mapping[str, Block] = {
    "Mixed_5b": mixed_5(32),
    "Mixed_5c": mixed_5(64),
    "Mixed_5d": mixed_5(64),
    "Mixed_6a": MIXED_6A,
    "Mixed_6b": mixed_6(128),
    "Mixed_6c": mixed_6(160),
    "Mixed_6d": mixed_6(160),
    "Mixed_6e": mixed_6(192),
    "Mixed_7a": MIXED_7A,
    "Mixed_7b": MIXED_7,
    "Mixed_7c": MIXED_7,
}
AUX_READS = "Mixed_6e"


class Aux(nn.Module):
    """Auxiliary scores of each image, from features in the middle."""

    def __init__(self, inputs: int, classes: int, scaled: Callable[[int], int]) -> None:
        super().__init__()
        self.conv0 = Conv(inputs, scaled(128), 1)
        self.conv1 = Conv(scaled(128), scaled(768), 5)
        self.fc = nn.Linear(scaled(768), classes)

    def forward(self, features: Tensor) -> Tensor:
        features = self.conv1(self.conv0(F.avg_pool2d(features, 5, stride=3)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(features, 1), 1))


class InceptionV3(nn.Module):
    """Class scores of each image; in training with `aux` both scores, as InceptionOutputs.

    >>> InceptionV3(classes=7, width=2).eval()(torch.zeros(2, 3, 75, 97)).shape
    torch.Size([2, 7])
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 1000,
        width: int = WIDTH,
        aux: bool = True,
        dropout: float = 0.5,
    ) -> None:
        """Builds stem, blocks and heads, their channels scaled to `width`; `dropout` stands before the scores."""
        super().__init__()
        check_positive("InceptionV3", in_channels=in_channels, classes=classes, width=width)
        check_rate("InceptionV3", dropout=dropout)

        def scaled(channels: int) -> int:
            return max(1, channels * width // WIDTH)

        self.in_channels = in_channels
        self.Conv2d_1a_3x3 = Conv(in_channels, width, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(width, width, 3)
        self.Conv2d_2b_3x3 = Conv(width, scaled(64), 3, padding=1)
        self.maxpool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = Conv(scaled(64), scaled(80), 1)
        self.Conv2d_4a_3x3 = Conv(scaled(80), scaled(192), 3)
        self.maxpool2 = nn.MaxPool2d(3, stride=2)
        self.AuxLogits: Aux | None = None
        channels = scaled(192)
        for name, block in BLOCKS.items():
            mixed = Mixed(channels, block, scaled)
            self.add_module(name, mixed)
            channels = mixed.outputs
            if name == AUX_READS and aux:
                self.AuxLogits = Aux(channels, classes, scaled)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)
        self.initialize()

    def initialize(self) -> None:
        """Draws the weights as torchvision does."""
        draw = partial(nn.init.trunc_normal_, a=-2, b=2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                draw(module.weight, std=0.1)
        if self.AuxLogits is not None:
            draw(self.AuxLogits.fc.weight, std=0.001)

    def forward(self, image: Tensor) -> Tensor | InceptionOutputs:
        """Scores of shape (batch, classes), or both scores."""
        scores_aux = self.AuxLogits is not None and self.training
        smallest = SMALLEST_WITH_AUX if scores_aux else SMALLEST
        check_image("InceptionV3", image.shape, self.in_channels, dims=2, smallest=smallest)
        features: Tensor = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(image)))
        features = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(self.maxpool1(features)))
        features = self.maxpool2(features)
        auxiliary: Tensor | None = None
        for name in BLOCKS:
            features = self.get_submodule(name)(features)
            if name == AUX_READS and self.AuxLogits is not None and self.training:
                auxiliary = self.AuxLogits(features)
        scores: Tensor = self.fc(torch.flatten(self.dropout(self.avgpool(features)), 1))
        return scores if auxiliary is None else InceptionOutputs(scores, auxiliary)


def inception_v3(
    in_channels: int = 3, classes: int = 1000, width: int = WIDTH, aux: bool = True, dropout: float = 0.5
) -> InceptionV3:
    """Inception-v3: 27.2 million parameters at width 32, 23.8 million without the auxiliary head."""
    return InceptionV3(in_channels, classes, width, aux, dropout)
