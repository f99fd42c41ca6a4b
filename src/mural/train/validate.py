"""Validation: the scores of held-out images, and their predictions in files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mural.comm.failure.agree import any_rank
from mural.data import Batch
from mural.data.image_sample import name_at
from mural.data.loading.sample_source import SampleSource
from mural.engine.result_tiles import ResultTile
from mural.geometry import Interval
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.shard.relayout import merged
from mural.train.class_names import with_names
from mural.train.domain_batches import DomainBatch, DomainLoader
from mural.train.meters import gathered
from mural.train.prediction_files import PREDICTIONS, SUFFIX, PredictionWriters, file_stems, write
from mural.train.training_run import Run

# -- scores ------------------------------------------------------------------------------------------------------------


class Scores:
    """Adds up batches. Class scores are kept where the output has one channel per class of an integer target."""

    def __init__(self) -> None:
        self.loss = self.images = 0.0
        self.confusion: Tensor | None = None
        self.error = 0.0

    def add(self, output: Any, target: Any, loss: float, images: int) -> Any:
        """Count a batch; returns its prediction (N, C, …): classes where there are any, else the output. Collective."""
        self._add_loss(loss, images)
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return output
        predicted = classes_of(output, target)
        if predicted is None:
            if output.shape == target.shape:
                self.error += float((output.detach() - target).abs().mean()) * images
            return output
        if predicted.shape == target.shape:
            self._add_counts(confusion(predicted, target, classes_in(output.shape)))
        classes = predicted if predicted.ndim == output.ndim else predicted.unsqueeze(1)
        return classes.to(class_type(output.shape))

    def add_tiles(self, tiles: RatedTiles, loss: float, images: int) -> None:
        """Count a batch that was rated tile by tile. Collective."""
        self._add_loss(loss, images)
        counts, error = tiles.rating()
        self.error += error * images
        if counts is not None:
            self._add_counts(counts)

    def _add_loss(self, loss: float, images: int) -> None:
        self.loss += loss * images
        self.images += images

    def _add_counts(self, counts: Tensor) -> None:
        self.confusion = counts if self.confusion is None else self.confusion + counts

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


def classes_in(shape: Sequence[int]) -> int:
    """How many classes a result of that shape (N, K, …) tells apart; one channel tells two."""
    return max(2, int(shape[1])) if len(shape) > 1 else 2


def class_type(shape: Sequence[int]) -> torch.dtype:
    """The type in which the classes of a result of that shape are written."""
    return torch.uint8 if classes_in(shape) <= 256 else torch.uint16


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


# -- scores of tiles ---------------------------------------------------------------------------------------------------


class RatedTiles:
    """Takes the result of one batch tile by tile: adds up what its scores need, and writes its predictions to files.

    Whether a target of one channel holds two classes is known when all tiles of all ranks were seen, so that until then
    both kinds of scores are added up.
    """

    def __init__(self, batch: Batch, mesh: Mesh, files: PredictionWriters):
        self.batch, self.mesh, self.files = batch, mesh, files
        self.counts = torch.zeros(0, 0, dtype=torch.float64)
        self.classed = self.unclassed = self.values = self.error = 0.0

    def begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Make room for the counts of classes, and begin the files. Collective."""
        self.counts = torch.zeros(classes_in(shape), classes_in(shape), dtype=torch.float64)
        if self.files.names and len(shape) == len(self.batch.shape):
            self.predict = prediction(shape, self.batch.target, self.mesh)
            like = self.predict(torch.empty((0, *shape[1:]), dtype=dtype))
            self.files.open(like.shape[1:], like.dtype)

    def take(self, tile: ResultTile) -> None:
        """Add a tile to the sums, and write its prediction."""
        if tile.target is not None:
            self._rate(tile.output, tile.target)
        if self.files.writers:
            predicted = self.predict(tile.output)
            images, _, *place = tile.box
            self.files.write((images, Interval(0, predicted.shape[1]), *place), predicted)

    def _rate(self, output: Tensor, target: Tensor) -> None:
        predicted = classes_of(output, target)
        if predicted is not None and predicted.shape == target.shape:
            self.counts += confusion(predicted, target, len(self.counts))
            self.classed += 1
        if output.shape == target.shape:
            self.unclassed += predicted is None
            self.values += output.numel()
            self.error += float((output.detach() - target).abs().sum(dtype=torch.float64))

    def rating(self) -> tuple[Tensor | None, float]:
        """The counts of classes in all tiles of all ranks, or None and the mean absolute error. Collective."""
        mine = [*self.counts.flatten().tolist(), self.classed, self.unclassed, self.values, self.error]
        sums = torch.tensor(gathered(self.mesh, mine), dtype=torch.float64).sum(0)
        classed, unclassed, values, error = sums[-4:].tolist()
        if classed and not unclassed:
            return sums[:-4].view(self.counts.shape), 0.0
        return None, error / max(values, 1.0)


def prediction(shape: Sequence[int], target: Any, mesh: Mesh) -> Callable[[Tensor], Tensor]:
    """What makes predictions (N, C, …) of tiles of a result of that shape, as `Scores.add` of the whole. Collective."""
    masks: list[SampleSource] = target if isinstance(target, list) else []
    kind = class_type(shape)
    if masks and masks[0].flat and not masks[0].dtype.is_floating_point and shape[1] > 1:
        return lambda output: output.argmax(1, keepdim=True).to(kind)
    single = masks and not masks[0].flat and (1, *shape[2:]) == tuple(shape[1:]) == masks[0].shape
    if single and in_two_classes(masks, mesh):
        return lambda output: (output > 0).to(kind)
    return lambda output: output


def in_two_classes(masks: Sequence[SampleSource], mesh: Mesh) -> bool:
    """Whether masks hold nothing but 0 and 1; every rank looks at its share of their windows. Collective."""
    mine = [(mask, window) for mask in masks for window in mask.windows()][mesh.rank :: mesh.world]
    found = (mask.read(window) for mask, window in mine)
    return not any_rank(mesh, not all(bool(((part == 0) | (part == 1)).all()) for part in found))[0]


# -- validation --------------------------------------------------------------------------------------------------------


def validate(run: Run, step: int) -> dict[str, Any]:
    """The scores of all held-out images under this step's weights; predictions are written if asked for. Collective."""
    if run.held_out is None:
        raise ValueError("there is nothing to validate on")
    pm, several = run.pm, isinstance(run.held_out, DomainLoader)
    loaders = run.held_out.loaders if isinstance(run.held_out, DomainLoader) else {"": run.held_out}
    folder, kind = run.config.folder / PREDICTIONS / f"step-{step:06d}", run.config.validation.write
    ratings = [Rating(name, loader.dataset, folder / name, kind) for name, loader in loaders.items()]
    pm.synchronise(run.optimizer)
    pm.eval()
    for batch in run.held_out.epoch(0):
        run.begins(f"validation after step {step}")
        with run.naming(batch, f"the validation after step {step}"):
            rate_domains(run, batch, ratings) if isinstance(batch, DomainBatch) else rate(run, batch, *ratings)
    run.journal.advance(step)
    pm.train()
    found = pm.from_last(scores_of_domains(ratings) if several else ratings[0].scores.result())
    found = with_names(found, run.config.data.classes)
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    run.journal.note("validation", step, found, numbers)
    run.journal.say(f"validation after step {step}: " + "  ".join(f"{n} {v:.4f}" for n, v in numbers.items()))
    run.judge()
    return found


class Rating:
    """The scores of the held-out samples of one domain, and the files of their predictions."""

    def __init__(self, name: str, samples: Any, folder: Path, kind: str):
        self.name, self.folder, self.kind, self.scores = name, folder, kind, Scores()
        self.stems = file_stems([name_at(samples, index) or f"sample {index}" for index in range(len(samples))])

    def files(self, batch: Batch) -> list[Path]:
        """Where the predictions of a batch go; none if they are not written."""
        if not self.kind:
            return []
        return [self.folder / (self.stems[index] + SUFFIX[self.kind]) for index in batch.indices]

    def add(self, output: Any, target: Any, loss: float, batch: Batch) -> None:
        """Count a batch, and write its predictions. Collective."""
        predicted = self.scores.add(output, target, loss, batch.shape[0])
        if self.kind and isinstance(predicted, ShardedTensor):
            write(self.files(batch), predicted, batch)


def scores_of_domains(ratings: Sequence[Rating]) -> dict[str, Any]:
    """The source's scores, and those of targets under their names, as "field/accuracy"."""
    source, *targets = ratings
    found: dict[str, Any] = dict(source.scores.result())
    for target in targets:
        found |= {f"{target.name}/{key}": value for key, value in target.scores.result().items() if key != "loss"}
    return found


def rate_domains(run: Run, batch: DomainBatch, ratings: Sequence[Rating]) -> None:
    """Add a batch of each domain to its scores; one that was seen before does not count. Collective."""
    output, target, loss = run.pm.evaluate(batch.image, batch.target)
    for number, (part, rating) in enumerate(zip(batch.domains, ratings, strict=True)):
        if batch.counted[number]:
            here = output is not None
            rating.add(output[0][number] if here else None, target[rating.name] if here else None, float(loss), part)


def rate(run: Run, batch: Batch, rating: Rating) -> None:
    """Add a batch to the scores, and write its predictions to files, if there are any. Collective."""
    files, scores = rating.files(batch), rating.scores
    if isinstance(batch.image, list):  # the result may be too large to be held
        with PredictionWriters(files, run.mesh, batch) as writers:
            tiles = RatedTiles(batch, run.mesh, writers)
            loss = run.pm.evaluate_into(batch.image, batch.target, tiles)
        scores.add_tiles(tiles, float(loss), batch.shape[0])
        return
    output, target, loss = run.pm.evaluate(batch.image, batch.target)
    rating.add(output, target, float(loss), batch)
