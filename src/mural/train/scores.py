"""The scores of results: counts of classes, or of yes and no for each channel, and distances, added up over batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mural.shard import ShardedTensor
from mural.shard.relayout import merged
from mural.train.config import Config
from mural.train.result_meaning import Meaning, meaning_of


@dataclass(frozen=True)
class Tally:
    """What the scores of some positions need: sums, so that those of batches, tiles and ranks may be added."""

    counts: Tensor
    """(1, K, K): positions of a class (row) that were taken for another; of channels (K, 2, 2) of no and yes."""
    distance: float = 0.0
    """The sum of |result − target|; of a channel that says yes or no, of the probability."""
    values: float = 0.0
    soft: float = 0.0
    """Above 0 if targets have other values than 0 and 1."""
    compared: float = 0.0
    """Above 0 if there was a target that results can be compared with."""

    @classmethod
    def none(cls, meaning: Meaning, channels: int) -> Tally:
        """That of no positions."""
        return cls(torch.zeros(counts_shape(meaning, channels), dtype=torch.float64))

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.counts + other.counts, *(a + b for a, b in zip(self.sums, other.sums, strict=True)))

    @property
    def sums(self) -> list[float]:
        """All but the counts."""
        return [self.distance, self.values, self.soft, self.compared]

    @property
    def numbers(self) -> list[float]:
        """All of it, as other ranks take it."""
        return [*self.counts.flatten().tolist(), *self.sums]

    def of(self, numbers: Tensor) -> Tally:
        """A tally of the same form from its numbers."""
        return Tally(numbers[:-4].view(self.counts.shape), *numbers[-4:].tolist())


def counts_shape(meaning: Meaning, channels: int) -> tuple[int, int, int]:
    """The shape of the counts of a result with so many channels."""
    return (1, channels, channels) if meaning.kind == "classes" else (channels, 2, 2) if meaning.binary else (1, 0, 0)


def tally(meaning: Meaning, output: Tensor, target: Any) -> Tally:
    """How results (N, K, …) compare with targets; positions without a class or a value do not count. Collective."""
    empty = Tally.none(meaning, channels_of(output.shape))
    if not isinstance(target, Tensor):
        return empty
    if meaning.kind == "classes":
        truth = classes_of(output, target)
        return (
            empty
            if truth is None
            else replace(empty, counts=confusion(output.argmax(1), truth, output.shape[1]), compared=1)
        )
    if target.ndim == output.ndim - 1 and output.shape[1] == 1:
        target = target.unsqueeze(1)
    if target.shape != output.shape:
        return empty
    known = target == target
    soft = float(not bool(((target == 0) | (target == 1) | ~known).all()))
    values = meaning.probabilities(output) if meaning.binary else output.detach()
    apart = (values.double() - target).abs().masked_fill(~known, 0.0)
    found = replace(empty, distance=float(apart.sum()), values=float(known.double().sum()), soft=soft, compared=1)
    if not meaning.binary or soft:
        return found
    channel = torch.arange(channels_of(output.shape), device=output.device).view(-1, *[1] * (output.ndim - 2))
    pairs = channel * 4 + (target == 1).long() * 2 + meaning.labels(output).long()
    return replace(found, counts=counted(pairs, known, found.counts.numel()).view(found.counts.shape))


def channels_of(shape: Sequence[int]) -> int:
    """The channels of a result (N, K, …), one where it has no dim for them."""
    return shape[1] if len(shape) > 1 else 1


def classes_of(output: Tensor, target: Tensor) -> Tensor | None:
    """The class of each position of a target: a class itself, or the greatest of several probabilities; or None."""
    if target.shape == output.shape and target.is_floating_point() and output.shape[1] > 1:
        known = (target == target).all(1)
        return target.argmax(1).masked_fill(~known, -1)
    if target.shape[1:2] == (1,) and target.ndim == output.ndim:
        target = target[:, 0]
    if target.shape != (output.shape[0], *output.shape[2:]):
        return None
    return target.masked_fill(target != target, -1).long() if target.is_floating_point() else target.long()


def confusion(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """How often class i was taken for class j, over all ranks; targets out of range (ignored ones) do not count."""
    known = (target >= 0) & (target < classes)
    return counted(target * classes + predicted, known, classes**2).view(1, classes, classes)


def counted(pairs: Tensor, known: Tensor, count: int) -> Tensor:
    """How often each number below `count` occurs among known positions, over all ranks."""
    marked: Any = torch.where(known, pairs, torch.full_like(pairs, count))
    local = marked.local if isinstance(marked, ShardedTensor) else marked
    found = torch.bincount(local.reshape(-1), minlength=count + 1)[:count].double()
    if isinstance(marked, ShardedTensor):
        axes = marked.placement.axes_of(range(marked.placement.ndim))
        found = merged(found, marked.mesh, axes, "counts of classes")
    return found.cpu()


class Scores:
    """Adds up batches: what is scored follows from what results mean."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.loss = self.images = self.error = 0.0
        self.total: Tally | None = None
        self.meaning: Meaning | None = None

    def means(self, shape: Sequence[int]) -> Meaning:
        """What results of a shape mean."""
        if self.meaning is None:
            self.meaning = meaning_of(self.config, channels_of(shape))
        return self.meaning

    def add(self, output: Any, target: Any, loss: float, images: int) -> Any:
        """Count a batch; returns its prediction (N, C, …), as `mural predict` gives it. Collective."""
        if not isinstance(output, Tensor):
            self.add_tally(None, loss, images)
            return output
        output = output.unsqueeze(1) if output.ndim == 1 else output
        meaning = self.means(output.shape)
        self.add_tally(tally(meaning, output, target), loss, images)
        return meaning.labels(output)

    def add_tally(self, found: Tally | None, loss: float, images: int) -> None:
        """Count a batch of so many images."""
        self.loss += loss * images
        self.images += images
        if found is not None:
            self.error += found.distance / max(found.values, 1.0) * images
            self.total = found if self.total is None else self.total + found

    def result(self) -> dict[str, float | list[float]]:
        """The scores of all batches."""
        images = max(self.images, 1.0)
        found: dict[str, float | list[float]] = {"loss": self.loss / images}
        total, meaning = self.total, self.meaning
        if total is None or meaning is None or not total.compared:
            return found
        if meaning.kind == "classes" or (meaning.binary and not total.soft):
            return found | class_scores(total.counts)
        # Targets of 0 and 1 alone may well be yes and no: a distance from what is not known to be values says nothing.
        doubtful = meaning.kind == "unknown" and not total.soft
        return found if doubtful else found | {"absolute_error": self.error / images}


def class_scores(counts: Tensor) -> dict[str, float | list[float]]:
    """Accuracy and overlaps from counts of classes (1, K, K), or of channels (K, 2, 2), whose yes is what overlaps.

    >>> class_scores(torch.tensor([[[2.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [1.0, 1.0]]]))["iou"]
    [1.0, 0.333333]
    """
    both = counts.diagonal(dim1=1, dim2=2)
    either = counts.sum(1) + counts.sum(2) - both
    if len(counts) > 1:  # of several channels, each overlaps where it says yes
        both_here, either = both[:, 1], either[:, 1]
    else:
        both_here, either = both[0], either[0]
    seen = either > 0
    overlap = torch.where(seen, both_here / either.clamp(min=1), torch.zeros_like(both_here))
    there = bool(seen.any())
    return {
        "accuracy": float(both.sum() / counts.sum().clamp(min=1)),
        "mean_iou": float(overlap[seen].mean()) if there else 0.0,
        "mean_dice": float((2 * overlap / (1 + overlap))[seen].mean()) if there else 0.0,
        "iou": [round(float(v), 6) for v in overlap],
    }
