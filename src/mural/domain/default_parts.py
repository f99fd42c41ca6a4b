"""The encoders, decoders and heads of the paper of domain separation networks, for images and volumes of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mural.domain.separation_config import Separation
from mural.domain.separation_network import SeparationNetwork

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MAX_POOLS: dict[int, Any] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
ADAPTIVE_POOLS: dict[int, Any] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
GRID, COARSE = 4, 10
"""The extents of what is left of an image before it becomes a vector, and of what a vector becomes first."""


def map_encoder(channels: int, width: int = 32, dims: int = 2) -> nn.Sequential:
    """Two convolutions of 5 × 5 with pooling: a map of 2 `width` channels and a quarter of the image's extents."""
    conv, pool = CONVOLUTIONS[dims], MAX_POOLS[dims]
    return nn.Sequential(
        conv(channels, width, 5, padding=2),
        nn.ReLU(),
        pool(2),
        conv(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        pool(2),
    )


def vector_encoder(channels: int, code: int = 100, width: int = 32, dims: int = 2) -> nn.Sequential:
    """The same with a linear layer: a vector for each image."""
    linear = nn.Linear(2 * width * GRID**dims, code)
    return nn.Sequential(*map_encoder(channels, width, dims), ADAPTIVE_POOLS[dims](GRID), nn.Flatten(), linear)


def map_decoder(channels: int, width: int = 32, dims: int = 2) -> nn.Sequential:
    """An image of four times the extents of a map, by convolutions of 5 × 5 between two upsamplings."""
    conv = CONVOLUTIONS[dims]
    return nn.Sequential(
        conv(2 * width, 16, 5, padding=2), nn.ReLU(), nn.Upsample(scale_factor=2),
        conv(16, 16, 5, padding=2), nn.ReLU(), nn.Upsample(scale_factor=2), conv(16, channels, 5, padding=2),
    )  # fmt: skip


def vector_decoder(channels: int, size: Sequence[int], code: int = 100) -> nn.Sequential:
    """An image of extents `size` of a vector: a coarse image, upsampled between convolutions of 5 × 5."""
    dims = len(size)
    conv, grid = CONVOLUTIONS[dims], (COARSE,) * dims
    return nn.Sequential(
        nn.Linear(code, 3 * COARSE**dims), nn.ReLU(), nn.Unflatten(1, (3, *grid)), conv(3, 16, 5, padding=2), nn.ReLU(),
        nn.Upsample(size=tuple(size)), conv(16, 16, 5, padding=2), nn.ReLU(), conv(16, channels, 5, padding=2),
    )  # fmt: skip


def class_head(code: int, classes: int) -> nn.Sequential:
    """A score for each class, of a vector."""
    return nn.Sequential(nn.ReLU(), nn.Linear(code, code), nn.ReLU(), nn.Linear(code, classes))


def pixel_head(width: int, classes: int, dims: int = 2) -> nn.Sequential:
    """A score for each class at each position of the image, of a map of 2 `width` channels."""
    modes = {1: "linear", 2: "bilinear", 3: "trilinear"}
    return nn.Sequential(CONVOLUTIONS[dims](2 * width, classes, 1), nn.Upsample(scale_factor=4, mode=modes[dims]))


def domain_classifier(code: int, domains: int) -> nn.Sequential:
    """A score for each domain: the adversary."""
    return nn.Sequential(nn.Linear(code, 100), nn.ReLU(), nn.Linear(100, domains))


def classification_network(
    domains: Sequence[str],
    classes: int,
    image: Sequence[int],
    code: int = 100,
    width: int = 32,
    separation: Separation | None = None,
) -> SeparationNetwork:
    """The paper's network: a class for each image (C, H, W) or (C, D, H, W), by codes that are vectors.

    >>> network = classification_network(["photos", "drawings"], classes=10, image=(1, 28, 28))
    >>> network.domains
    ('photos', 'drawings')
    """
    channels, *size = image
    separation = Separation() if separation is None else separation
    return SeparationNetwork(
        {name: vector_encoder(channels, code, width, len(size)) for name in domains},
        vector_encoder(channels, code, width, len(size)),
        vector_decoder(channels, size, code),
        class_head(code, classes),
        domain_classifier(code, len(domains)) if separation.similarity == "adversary" else None,
        separation,
        image,
    )


def segmentation_network(
    domains: Sequence[str],
    classes: int,
    image: Sequence[int],
    width: int = 32,
    separation: Separation | None = None,
) -> SeparationNetwork:
    """A class for each position, by codes that are maps: images of any extents that are multiples of 4.

    >>> import torch
    >>> segmentation_network(["day", "night"], classes=2, image=(3, 64, 64)).predictor()(torch.rand(1, 3, 8, 12)).shape
    torch.Size([1, 2, 8, 12])
    """
    channels, *size = image
    separation = Separation() if separation is None else separation
    return SeparationNetwork(
        {name: map_encoder(channels, width, len(size)) for name in domains},
        map_encoder(channels, width, len(size)),
        map_decoder(channels, width, len(size)),
        pixel_head(width, classes, len(size)),
        domain_classifier(2 * width, len(domains)) if separation.similarity == "adversary" else None,
        separation,
        image,
    )
