"""Seconds of torch's kernels on a GPU: their bytes and products over its rates, times what each kind takes of both.

The numbers are those of all operations in steps of a U-Net, ResNet-50 and Swin-T on an H200, in bfloat16 and with
channels last where there are convolutions (`mural bench choice` has the steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mural.cost.fitted_model import SHORTEST
from mural.cost.rates import Rates

NARROW = 8
"""Convolutions with fewer channels than this on a side are far from any rate."""
REORDERED = 4.0
"""How many times its bytes a convolution takes longer on tensors that do not have channels last."""


@dataclass(frozen=True)
class KernelPrice:
    """How many times a kernel's bytes and products take what the device's rates say."""

    bytes: float = 1.5
    products: float = 1.7

    def seconds(self, size: float, products: float, rate: float, rates: Rates) -> float:
        """Seconds of a kernel that moves so many bytes, and computes so many products at a rate."""
        return max(SHORTEST, self.bytes * size / rates.bandwidth + self.products * products / rate)


OTHER = KernelPrice()
PRICES = {
    "convolution": KernelPrice(1.0, 1.05),
    "convolution_backward": KernelPrice(1.0, 1.1),
    "convolution narrow": KernelPrice(3.0, 20.0),
    "convolution_backward narrow": KernelPrice(20.0, 1.1),
    "convolution transposed": KernelPrice(5.3, 1.45),
    "convolution_backward transposed": KernelPrice(4.5, 1.5),
    "native_batch_norm": KernelPrice(5.2),
    "native_batch_norm_backward": KernelPrice(2.8),
    "native_layer_norm": KernelPrice(5.0),
    "native_layer_norm_backward": KernelPrice(3.7),
    "native_group_norm": KernelPrice(5.0),
    "native_group_norm_backward": KernelPrice(3.7),
    "max_pool2d_with_indices": KernelPrice(2.7),
    "max_pool2d_with_indices_backward": KernelPrice(3.9),
    "mm": KernelPrice(0.5, 1.7),
    "addmm": KernelPrice(1.0, 1.8),
    "bmm": KernelPrice(3.5, 1.0),
    "clone": KernelPrice(2.5),
    "_to_copy": KernelPrice(1.3),
    "cat": KernelPrice(2.4),
    "constant_pad_nd": KernelPrice(2.0),
    "slice_backward": KernelPrice(1.9),
    "index_add": KernelPrice(4.1),
    "index_select": KernelPrice(2.6),
    "roll": KernelPrice(2.6),
    "sum": KernelPrice(1.8),
    "_softmax": KernelPrice(1.7),
    "_softmax_backward_data": KernelPrice(2.1),
    "relu_": KernelPrice(1.05),
    "relu": KernelPrice(1.05),
    "threshold_backward": KernelPrice(1.05),
    "add": KernelPrice(1.2),
    "add_": KernelPrice(1.0),
    "gelu": KernelPrice(1.5),
    "gelu_backward": KernelPrice(1.3),
}
"""By the name of an operation; «narrow» and «transposed» are convolutions."""


def kernel_seconds(
    name: str, read: Sequence[Tensor], written: Sequence[Tensor], products: float, rates: Rates
) -> float:  # fmt: skip
    """Seconds of an operation of that name, which reads and writes tensors and computes so many products."""
    size = float(sum(tensor.nbytes for tensor in (*read, *written)))
    if not read:
        return OTHER.seconds(size, 0.0, 1.0, rates)
    conv = name.startswith("convolution")
    if conv:
        image, weight = read[1:3] if name.endswith("backward") else read[:2]
        name += kind_of_convolution(image, weight)
        size *= 1 + (0.0 if is_channels_last(image) or is_channels_last(weight) else REORDERED)
    rate = rates.of(str(read[0].dtype).split(".")[-1], "conv" if conv else "product")
    return PRICES.get(name, OTHER).seconds(size, products, rate, rates)


def kind_of_convolution(image: Tensor, weight: Tensor) -> str:
    """What a convolution is called besides its name."""
    if weight.shape[0] == image.shape[1] and weight.shape[1] != image.shape[1] and weight.shape[1] > 1:
        return " transposed"
    grouped = weight.shape[1] == 1 < image.shape[1]
    return " narrow" if min(weight.shape[:2]) < NARROW and not grouped else ""


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a convolution finds a tensor in the order that it computes in."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    return form is not None and tensor.is_contiguous(memory_format=form)
