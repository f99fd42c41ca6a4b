"""A model's result on its way into files: whole from each rank, or tile by tile, written the same."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from mural.data import Batch
from mural.engine import Parallel
from mural.engine.remote_results import Elsewhere
from mural.engine.result_tiles import ResultTile
from mural.errors import ConfigError
from mural.geometry import Interval
from mural.prediction.result_files import ImageFiles
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.train.config import Config
from mural.train.prediction_files import FileForm, PredictionWriters, writes_piece
from mural.train.result_meaning import meaning_of


class MapSink:
    """Takes the result of a batch, and writes its labels and probabilities. `with` and `begin` are collective."""

    def __init__(
        self, files: Sequence[ImageFiles], forms: Sequence[FileForm], batch: Batch, config: Config, mesh: Mesh
    ):
        self.batch, self.config = batch, config
        wanted = [one.probabilities for one in files if one.probabilities is not None]
        # Left in the other order: an image has its labels when everything else of it is there.
        self.labels = PredictionWriters([one.labels for one in files], mesh, batch, forms)
        self.probabilities = PredictionWriters(wanted, mesh, batch, forms) if wanted else None

    def __enter__(self) -> Self:
        self.opened = ExitStack().__enter__()
        for writers in self._writers:
            self.opened.enter_context(writers)
        return self

    @property
    def _writers(self) -> list[PredictionWriters]:
        return [self.labels] if self.probabilities is None else [self.labels, self.probabilities]

    def begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Begin the files."""
        if len(shape) != len(self.batch.shape) or shape[2:] != self.batch.shape[2:]:
            raise ConfigError(
                f"the model gives {shape} for images {self.batch.shape}: a prediction is written for every position of "
                f"an image, so that the extents after the channels have to be equal. A model whose strides leave a "
                f"remainder takes padded images: multiple=16, or --multiple 16"
            )
        self.meaning = meaning_of(self.config, shape[1])
        like = torch.empty((0, *shape[1:]), dtype=dtype)
        labels = self.meaning.labels(like)
        self.labels.open(labels.shape[1:], labels.dtype)
        if self.probabilities is not None:
            if self.meaning.kind in ("values", "unknown"):
                raise ConfigError(f'the model of loss.name = "{self.config.loss.name}" gives values, not probabilities')
            self.probabilities.open(shape[1:], torch.float32)

    def take(self, tile: ResultTile) -> None:
        """Write what a tile says."""
        images, channels, *place = tile.box
        labels = self.meaning.labels(tile.output)
        self.labels.write((images, Interval(0, labels.shape[1]), *place), labels)
        if self.probabilities is not None:
            self.probabilities.write((images, channels, *place), self.meaning.probabilities(tile.output))

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)


def deliver(pm: Parallel, batch: Batch, sink: MapSink) -> None:
    """Give the model's result for a batch to a sink: tile by tile where the plan streams. Collective."""
    if isinstance(batch.image, list):
        pm(batch.image, into=sink)
        return
    result = pm(batch.image)
    if not isinstance(result, (ShardedTensor, Elsewhere)):
        raise ConfigError(f"the model gives a {type(result).__name__}, but a prediction is one tensor with image dims")
    sink.begin(tuple(result.shape), result.dtype)
    if isinstance(result, ShardedTensor) and writes_piece(result) and result.local.numel():
        sink.take(ResultTile(result.local, None, result.box))
