"""A sliding window: what most tools predict large images by. Windows overlap, and their scores are averaged.

As MONAI's `sliding_window_inference` in its usual mode: windows of one size, the last of a row moved inwards, each with
the weight 1. All of the image and of its scores are in memory.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

AT_ONCE = 2**22
"""Pixels that go through the network together."""


def starts(extent: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along a dim.

    >>> starts(1000, 512, 0.25), starts(512, 512, 0.5)
    ([0, 384, 488], [0])
    """
    step = max(1, int(window * (1 - overlap)))
    return [min(at, extent - window) for at in range(0, max(1, extent - window + step), step)]


@torch.inference_mode()
def sliding_labels(model: nn.Module, image: Tensor, window: int, overlap: float) -> Tensor:
    """The classes (H, W) of an image (3, H, W) of bytes, on the device of both."""
    places = list(product(*(starts(extent, window, overlap) for extent in image.shape[1:])))
    total = counts = None
    step = max(1, AT_ONCE // window**2)
    for some in (places[at : at + step] for at in range(0, len(places), step)):
        boxes = [(slice(None), slice(y, y + window), slice(x, x + window)) for y, x in some]
        scores = model(torch.stack([image[box] for box in boxes]).float() / 255).float()
        if total is None or counts is None:
            total = scores.new_zeros(scores.shape[1], *image.shape[1:])
            counts = scores.new_zeros(1, *image.shape[1:])
        for box, part in zip(boxes, scores, strict=True):
            total[box] += part
            counts[box] += 1
    if total is None or counts is None:
        raise ValueError(f"an image {tuple(image.shape)} has no window of {window}")
    return (total / counts).argmax(0).to(torch.uint8)
