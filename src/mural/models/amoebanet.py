"""AmoebaNet-D for images: cells that an evolution found, each of which reads the two before it.

Real, Aggarwal, Huang and Le, "Regularized evolution for image classifier architecture search", 2018, in the size
(layers, filters) of Huang et al., "GPipe", 2018, whose parameter counts it has. Channels of a cell's operations:

    image ─ stem1 ─ stem2 ─ stem3 ─ normal × L/3 ─ reduction ─ normal × L/3 ─ reduction ─ normal × L/3 ─ scores
            F/4     F/2     F       F              2 F         2 F            4 F         4 F

`stem1` and each reduction cell halve the extents, `stem2` and `stem3` are reduction cells. A cell fits the outputs of
the cell before (state 0) and of the one before that (state 1) to its channels, then makes five more states, each
the sum of two operations on earlier ones, and returns some of its states side by side.

The wiring of the states is that of TensorFlow's reference code, which differs from the paper's figure and is the one
that GPipe, torchgpipe and MPI4DL measure on. Where torchgpipe writes a mean pool under the name of the max pool, this
is the max pool. Extents are halved rounding up, as in TensorFlow, so that odd ones meet; the mean before
the scores is taken over all positions that are left.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.models.checked_arguments import check_image, check_positive


def relu_conv_norm(inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: int = 1) -> list[nn.Module]:
    """ReLU, a convolution that keeps the extents at stride 1, and its norm."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return [nn.ReLU(), conv, nn.BatchNorm2d(outputs)]


def conv1(channels: int, stride: int) -> nn.Module:
    """A convolution k1."""
    return nn.Sequential(*relu_conv_norm(channels, channels, stride=stride))


def conv3(channels: int, stride: int) -> nn.Module:
    """A convolution k3 on a quarter of the channels, between two k1."""
    few = channels // 4
    return nn.Sequential(
        *relu_conv_norm(channels, few), *relu_conv_norm(few, few, (3, 3), stride), *relu_conv_norm(few, channels)
    )


def conv7(channels: int, stride: int) -> nn.Module:
    """Convolutions 1 × 7 and 7 × 1 on a quarter of the channels, between two k1."""
    few = channels // 4
    return nn.Sequential(
        *relu_conv_norm(channels, few),
        *relu_conv_norm(few, few, (1, 7)),
        *relu_conv_norm(few, few, (7, 1), stride),
        *relu_conv_norm(few, channels),
    )


def max2(channels: int, stride: int) -> nn.Module:
    """The largest of 2 × 2, of fewer at a far border."""
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def max3(channels: int, stride: int) -> nn.Module:
    """The largest of 3 × 3."""
    return nn.MaxPool2d(3, stride, padding=1)


def mean3(channels: int, stride: int) -> nn.Module:
    """The mean of 3 × 3, at a border of what is inside."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def none(channels: int, stride: int) -> nn.Module:
    """Nothing; no cell strides it."""
    return nn.Identity()


Operation = Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Wiring:
    """Which states the operations of a cell read, in pairs that are added, and which states it returns."""

    sums: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]
    returned: tuple[int, ...]


NORMAL = Wiring(
    (
        ((1, conv1), (1, max3)),
        ((1, none), (0, conv7)),
        ((0, conv1), (0, conv7)),
        ((2, max3), (2, none)),
        ((1, mean3), (5, conv1)),
    ),
    returned=(0, 3, 4, 6),
)
REDUCTION = Wiring(
    (
        ((0, max2), (0, max3)),
        ((2, none), (1, conv3)),
        ((2, conv7), (2, max3)),
        ((3, none), (1, max2)),
        ((2, mean3), (3, conv1)),
    ),
    returned=(4, 5, 6),
)
WIRINGS: Mapping[bool, Wiring] = {False: NORMAL, True: REDUCTION}


class Halve(nn.Module):
    """Half the extents by two convolutions k1, one on the even positions and one on the odd, side by side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, features: Tensor) -> Tensor:
        active = self.relu(features)
        shifted = F.pad(active[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.even(active), self.odd(shifted)], dim=1))


def fitted(inputs: int, outputs: int, halve: bool) -> nn.Module:
    """What brings the output of the cell before the last to this cell's channels and extents."""
    if halve:
        return Halve(inputs, outputs)
    return nn.Identity() if inputs == outputs else nn.Sequential(*relu_conv_norm(inputs, outputs))


class Cell(nn.Module):
    """Five sums of two operations each, on the outputs of the two cells before."""

    def __init__(self, before: int, last: int, channels: int, reduction: bool, halve: bool) -> None:
        """Reads `before` channels of the cell before the last, halved first if the last was a reduction."""
        super().__init__()
        wiring = WIRINGS[reduction]
        operations = [operation for pair in wiring.sums for operation in pair]
        # Only the two states from outside still have the larger extents.
        strides = [2 if reduction and state < 2 else 1 for state, _ in operations]
        self.fit_last = nn.Sequential(*relu_conv_norm(last, channels))
        self.fit_before = fitted(before, channels, halve)
        self.operations = nn.ModuleList(
            build(channels, stride) for (_, build), stride in zip(operations, strides, strict=True)
        )
        self.reads = tuple(state for state, _ in operations)
        self.returned = wiring.returned

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states: list[Tensor] = [self.fit_last(last), self.fit_before(before)]
        results = (operation(states[state]) for state, operation in zip(self.reads, self.operations, strict=True))
        for first, second in zip(results, results, strict=True):
            states.append(first + second)
        return torch.cat([states[state] for state in self.returned], dim=1)


class AmoebaNetD(nn.Module):
    """Class scores of each image; `layers` normal cells in three groups, with `filters` channels in the first.

    >>> AmoebaNetD(layers=3, filters=16, classes=7)(torch.zeros(2, 3, 65, 47)).shape
    torch.Size([2, 7])
    """

    def __init__(self, layers: int = 18, filters: int = 256, classes: int = 1000, in_channels: int = 3) -> None:
        """Builds cells that halve the extents five times; layers are a multiple of 3, filters at least 8."""
        super().__init__()
        check_positive("AmoebaNetD", layers=layers, filters=filters, classes=classes, in_channels=in_channels)
        check_size(layers, filters)
        self.in_channels = in_channels
        stem = filters // 4
        self.stem1 = nn.Sequential(*relu_conv_norm(in_channels, stem, kernel=(3, 3), stride=2))
        before = last = stem
        halve = False
        for name, times, reduction in sequence(layers // 3):
            self.add_module(name, Cell(before, last, stem * times, reduction, halve))
            before, last, halve = last, stem * times * len(WIRINGS[reduction].returned), reduction
        self.classify = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        check_image("AmoebaNetD", image.shape, self.in_channels, dims=2)
        before = last = self.stem1(image)
        for child in self.children():
            if isinstance(child, Cell):
                before, last = last, child(last, before)
        return self.classify(last)


def sequence(repeats: int) -> list[tuple[str, int, bool]]:
    """The cells in order: the name, the channels in multiples of the stem's, and whether it is a reduction.

    >>> sequence(1)[:4]
    [('stem2', 2, True), ('stem3', 4, True), ('cell1_normal1', 4, False), ('cell2_reduction', 8, True)]
    """
    cells = [("stem2", 2, True), ("stem3", 4, True)]
    for group, times in enumerate((4, 8, 16)):
        if group:
            cells.append((f"cell{2 * group}_reduction", times, True))
        cells.extend((f"cell{2 * group + 1}_normal{number}", times, False) for number in range(1, repeats + 1))
    return cells


def check_size(layers: int, filters: int) -> None:
    """Raises ValueError for layers that do not make three equal groups, or too few filters for a quarter of them."""
    if layers % 3:
        near = 3 * (layers // 3 + 1)
        raise ValueError(f"AmoebaNetD got layers={layers}, but layers are a multiple of 3: set layers={near}")
    if filters < 8:
        raise ValueError(f"AmoebaNetD got filters={filters}, but filters are at least 8: set filters=8")


def amoebanetd(layers: int = 18, filters: int = 256, classes: int = 1000, in_channels: int = 3) -> AmoebaNetD:
    """AmoebaNet-D (layers, filters): (18, 208) has 81.5 million parameters, (72, 512) has 1.84 billion."""
    return AmoebaNetD(layers, filters, classes, in_channels)
