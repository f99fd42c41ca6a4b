"""What a trained model gets right: run on whole images, or on overlapping tiles as large as its patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from context.bounds import accuracies, starts
from context.scene import CLASSES, Question, Scene
from context.training import cut, pixels

AT_ONCE = 2**22
"""Pixels that go through the model together."""


def chances(model: nn.Module, images: Tensor) -> Tensor:
    """The chance of each class (N, CLASSES, H, W), in the precision of training."""
    half = images.is_cuda
    with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=half):
        return model(pixels(images)).float().softmax(1)


def on_whole(model: nn.Module, images: Tensor) -> Tensor:
    """Chances from one look at each image."""
    count = max(1, AT_ONCE // images[0, ..., 0].numel())
    return torch.cat([chances(model, part) for part in images.split(count)])


def on_tiles(model: nn.Module, images: Tensor, patch: int) -> Tensor:
    """Chances from tiles that overlap by half, averaged where they meet, the middle of a tile counting most."""
    size, step = images.shape[1], max(1, patch // 2)
    first = starts(size, patch)
    pick = torch.tensor([(0, r, c) for r in first for c in first], device=images.device)
    ramp = torch.minimum(torch.arange(1, patch + 1), torch.arange(patch, 0, -1)).float().to(images.device)
    weight = (ramp[:, None] * ramp).expand(1, 1, patch, patch) / ramp.max() ** 2

    def laid(tiles: Tensor) -> Tensor:
        columns = tiles.flatten(1).T[None]
        return F.fold(columns, (size, size), (patch, patch), stride=step)[0]

    total = laid(weight.expand(len(pick), 1, patch, patch))
    found: list[Tensor] = []
    for image in images:
        tiles = cut(image[None], pick, patch)
        parts = [chances(model, part) for part in tiles.split(max(1, AT_ONCE // patch**2))]
        found.append(laid(torch.cat(parts) * weight) / total)
    return torch.stack(found)


def scored(chance: Tensor, scene: Scene, question: Question, far: Tensor) -> dict[str, Any]:
    """Balanced accuracies on the pixels of nuclei (which of the two kinds?), and the mean IoU of the three classes."""
    target = scene.answer(question).long()
    right = (chance[:, 1:].argmax(1) + 1 == target).float()
    label = chance.argmax(1)
    table = torch.bincount((target * CLASSES + label).flatten(), minlength=CLASSES**2).view(CLASSES, CLASSES).double()
    overlap = table.diagonal() / (table.sum(0) + table.sum(1) - table.diagonal()).clamp_min(1)
    return accuracies(right, target, far) | {"iou": float(overlap.mean())}
