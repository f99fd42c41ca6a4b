"""Validation: the scores of held-out images, and their predictions in files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mural.data.image_sample import name_at
from mural.shard import ShardedTensor
from mural.shard.relayout import merged
from mural.train.prediction_files import PREDICTIONS, SUFFIX, file_stems, write
from mural.train.training_run import Run

# -- scores ------------------------------------------------------------------------------------------------------------


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
    """The predicted class of every position (or image); None where the output does not hold scores of classes."""
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


# -- validation --------------------------------------------------------------------------------------------------------


def validate(run: Run, step: int) -> dict[str, Any]:
    """The scores of all held-out images under this step's weights; predictions are written if asked for. Collective."""
    if run.held_out is None:
        raise ValueError("there is nothing to validate on")
    pm, scores, samples = run.pm, Scores(), run.held_out.dataset
    stems = file_stems([name_at(samples, index) or f"sample {index}" for index in range(len(samples))])
    pm.synchronise(run.optimizer)
    pm.eval()
    for batch in run.held_out.epoch(0):
        run.begins(f"validation after step {step}")
        with run.naming(batch, f"the validation after step {step}"):
            output, target, loss = pm.evaluate(batch.image, batch.target)
        predicted = scores.add(output, target, float(loss), batch.shape[0])
        if run.config.validation.write and isinstance(predicted, ShardedTensor):
            folder = run.config.folder / PREDICTIONS / f"step-{step:06d}"
            suffix = SUFFIX[run.config.validation.write]
            write(folder, [stems[index] + suffix for index in batch.indices], predicted)
    run.journal.advance(step)
    pm.train()
    found = pm.from_last(scores.result())
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    run.journal.note("validation", step, found, numbers)
    run.journal.say(f"validation after step {step}: " + "  ".join(f"{n} {v:.4f}" for n, v in numbers.items()))
    return found
