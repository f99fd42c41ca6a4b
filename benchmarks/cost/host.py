"""What the host spends on each call of a model, before a GPU begins it: measured on chains of tiny layers.

A GPU runs what the host has queued. Where layers are small the host is the slower of the two, and a step takes as long
as the host needs to queue it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from layers import Layer
from torch import Tensor, nn

LENGTH, REPEATS = 24, 9


def attention(x: Tensor) -> Tensor:
    """Attention of a tensor to itself."""
    return F.scaled_dot_product_attention(x, x, x)


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(16, 16, 3, padding=1, bias=False),
    "conv with bias": lambda: nn.Conv2d(16, 16, 3, padding=1),
    "transposed": lambda: nn.ConvTranspose2d(16, 16, 3, padding=1),
    "linear": lambda: nn.Linear(16, 16),
    "matmul": lambda: Layer(lambda x: x @ x),
    "attention": lambda: Layer(attention),
    "batch_norm": lambda: nn.BatchNorm2d(16),
    "instance_norm": lambda: nn.InstanceNorm2d(16, affine=True),
    "group_norm": lambda: nn.GroupNorm(4, 16),
    "layer_norm": lambda: nn.LayerNorm(16),
    "max_pool": lambda: nn.MaxPool2d(3, 1, 1),
    "avg_pool": lambda: nn.AvgPool2d(3, 1, 1),
    "adaptive_avg_pool": lambda: nn.AdaptiveAvgPool2d(16),
    "pointwise": lambda: nn.ReLU(),
    "binary": lambda: Layer(lambda x: x + x),
    "cat": lambda: Layer(lambda x: torch.cat((x, x), 1)[:, :16]),
    "interpolate": lambda: Layer(lambda x: F.interpolate(x, size=(16, 16), mode="bilinear")),
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.1),
    "mean": lambda: Layer(lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 16, 16)),
    "view": lambda: Layer(lambda x: x.transpose(2, 3)),
    "copy": lambda: Layer(lambda x: x.transpose(2, 3).contiguous()),
}
"""A layer of each family that maps 16 channels of 16 × 16 to the same."""


def host_seconds(device: torch.device | str) -> dict[str, tuple[float, float]]:
    """Seconds of one call, forward and backward, for each family."""
    return {name: chain_seconds(build, torch.device(device)) for name, build in CHAINS.items()}


def chain_seconds(build: Callable[[], nn.Module], device: torch.device) -> tuple[float, float]:
    """Seconds of a tiny layer in a chain of them, where nothing but the host takes time."""
    chain = nn.Sequential(*(build() for _ in range(LENGTH))).to(device)
    image = torch.rand((1, 16, 16, 16), device=device, requires_grad=True)
    gradient = torch.ones_like(image)
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(REPEATS):
        chain.zero_grad(set_to_none=True)
        image.grad = None
        begin = synchronized(device)
        output: Tensor = chain(image)
        between = synchronized(device)
        output.backward(gradient)
        forward.append((between - begin) / LENGTH)
        backward.append((synchronized(device) - between) / LENGTH)
    return median(forward), median(backward)


def synchronized(device: torch.device) -> float:
    """The time, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
