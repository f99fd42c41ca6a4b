"""Scores of whole images: losses, accuracy, overlap of classes, counted on pieces and added up over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mural.shard import ShardedTensor
from mural.shard.merge import merged


class Scores:
    """Adds up batches. Class scores are kept where the output has one channel per class of an integer target."""

    def __init__(self) -> None:
        self.loss = self.images = 0.0
        self.confusion: Tensor | None = None
        self.error = 0.0

    def add(self, output: Any, target: Any, loss: float, images: int) -> Any:
        """Count a batch; returns the predicted classes where there are any, else the output. Collective."""
        self.loss += loss * images
        self.images += images
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return output
        predicted = classes_of(output, target)
        if predicted is None:
            if output.shape == target.shape:
                self.error += float((output.detach() - target).abs().mean()) * images
            return output
        if predicted.shape == target.shape:
            classes = max(2, int(output.shape[1]))
            counts = confusion(predicted, target, classes)
            self.confusion = counts if self.confusion is None else self.confusion + counts
        return predicted

    def result(self) -> dict[str, float | list[float]]:
        """The scores of all batches."""
        images = max(self.images, 1.0)
        found: dict[str, float | list[float]] = {"loss": self.loss / images}
        if self.confusion is None:
            return found | ({"absolute_error": self.error / images} if self.error else {})
        both = self.confusion.diagonal()
        either = self.confusion.sum(0) + self.confusion.sum(1) - both
        seen = either > 0
        overlap = torch.where(seen, both / either.clamp(min=1), torch.zeros_like(both))
        found["accuracy"] = float(both.sum() / self.confusion.sum().clamp(min=1))
        found["mean_iou"] = float(overlap[seen].mean()) if bool(seen.any()) else 0.0
        found["mean_dice"] = float((2 * overlap / (1 + overlap))[seen].mean()) if bool(seen.any()) else 0.0
        found["iou"] = [round(float(v), 6) for v in overlap]
        return found


def classes_of(output: Tensor, target: Tensor) -> Tensor | None:
    """The predicted class of every position (or image); None where the output is no score of classes."""
    if not target.is_floating_point() and output.ndim == target.ndim + 1 and output.shape[1] > 1:
        return output.argmax(1)
    if output.shape == target.shape and output.shape[1:2] == (1,) and bool(((target == 0) | (target == 1)).all()):
        return (output > 0).to(torch.int64)
    return None


def confusion(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """How often class i was taken for class j, over all ranks; targets out of range (ignored ones) do not count."""
    target = target.to(torch.int64)
    known = (target >= 0) & (target < classes)
    pairs: Any = torch.where(known, target * classes + predicted, torch.full_like(target, classes * classes))
    local = pairs.local if isinstance(pairs, ShardedTensor) else pairs
    counts = torch.bincount(local.reshape(-1), minlength=classes * classes + 1)[: classes * classes].double()
    if isinstance(pairs, ShardedTensor):
        axes = pairs.placement.axes_of(range(pairs.placement.ndim))
        counts = merged(counts, pairs.mesh, axes, "confusion")
    return counts.cpu().view(classes, classes)
