"""Validation: the scores of held-out images, and their predictions in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mural.data import Batch
from mural.data.image_sample import name_at
from mural.engine.result_tiles import ResultTile
from mural.geometry import Interval
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.train.class_names import with_names
from mural.train.config import Config
from mural.train.domain_batches import DomainBatch, DomainLoader
from mural.train.meters import gathered
from mural.train.prediction_files import PREDICTIONS, SUFFIX, PredictionWriters, file_stems, write
from mural.train.scores import Scores, Tally, channels_of, tally
from mural.train.training_run import Run


class RatedTiles:
    """Takes the result of one batch tile by tile: adds up what its scores need, and writes its predictions to files."""

    def __init__(self, batch: Batch, mesh: Mesh, files: PredictionWriters, scores: Scores):
        self.batch, self.mesh, self.files, self.scores = batch, mesh, files, scores

    def begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Learn what results mean, and begin the files. Collective."""
        self.meaning = self.scores.means(shape)
        self.mine = Tally.none(self.meaning, channels_of(shape))
        if self.files.names and len(shape) == len(self.batch.shape):
            like = self.meaning.labels(torch.empty((0, *shape[1:]), dtype=dtype))
            self.files.open(like.shape[1:], like.dtype)

    def take(self, tile: ResultTile) -> None:
        """Add a tile to the sums, and write its prediction."""
        self.mine += tally(self.meaning, tile.output, tile.target)
        if self.files.writers:
            predicted = self.meaning.labels(tile.output)
            images, _, *place = tile.box
            self.files.write((images, Interval(0, predicted.shape[1]), *place), predicted)

    def rating(self) -> Tally:
        """What all tiles of all ranks have in common. Collective."""
        return self.mine.of(torch.tensor(gathered(self.mesh, self.mine.numbers), dtype=torch.float64).sum(0))


def validate(run: Run, step: int) -> dict[str, Any]:
    """The scores of all held-out images under this step's weights; predictions are written if asked for. Collective."""
    if run.held_out is None:
        raise ValueError("there is nothing to validate on")
    pm, several = run.pm, isinstance(run.held_out, DomainLoader)
    loaders = run.held_out.loaders if isinstance(run.held_out, DomainLoader) else {"": run.held_out}
    folder = run.config.folder / PREDICTIONS / f"step-{step:06d}"
    ratings = [Rating(run.config, name, loader.dataset, folder / name) for name, loader in loaders.items()]
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

    def __init__(self, config: Config, name: str, samples: Any, folder: Path):
        self.name, self.folder, self.kind, self.scores = name, folder, config.validation.write, Scores(config)
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
            tiles = RatedTiles(batch, run.mesh, writers, scores)
            loss = run.pm.evaluate_into(batch.image, batch.target, tiles)
        scores.add_tally(tiles.rating(), float(loss), batch.shape[0])
        return
    output, target, loss = run.pm.evaluate(batch.image, batch.target)
    rating.add(output, target, float(loss), batch)
