"""The samples that a configuration names, as datasets for training and validation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mural.data import Dataset, Loader, Sample
from mural.data import open as open_source
from mural.data.image_sample import opened, sample_at
from mural.data.loading.label_range import LabelRange
from mural.engine.inputs import Needs
from mural.errors import ConfigError, DataError
from mural.ranks import Mesh
from mural.train.config import Config, Files
from mural.train.factory import called, named


def datasets(config: Config) -> tuple[Any, Any]:
    """The samples to train on, and those that are held out (or None)."""
    data, held = config.data, config.validation
    training = one(data.images, data.masks, data.table, "data")
    if data.dataset is not None:
        if training is not None:
            raise ConfigError("data.dataset was given along with data.images or data.table: choose one")
        training = called(named(data.dataset, "data.dataset"), data.arguments, "data.arguments")
    if training is None:
        raise ConfigError('there is nothing to train on: set data.images = "…/*.tif", data.table or data.dataset')
    apart = one(held.images, held.masks, held.table, "validation")
    if apart is None and held.fraction > 0:
        whole = training if isinstance(training, Dataset) else Dataset.of(training[i] for i in range(len(training)))
        training, apart = whole.split(held.fraction, config.seed)
    return (training if data.repeat == 1 else Repeated(training, data.repeat)), apart


class Repeated:
    """A dataset several times over."""

    def __init__(self, samples: Any, times: int):
        self.samples, self.times = samples, times

    def __len__(self) -> int:
        return len(self.samples) * self.times

    def __getitem__(self, index: int) -> Sample:
        return sample_at(self.samples, index % len(self.samples))


def one(images: Files | None, masks: Files | None, table: Path | None, where: str) -> Dataset | None:
    """The samples of one table of the configuration."""
    if table is not None:
        if images is not None or masks is not None:
            raise ConfigError(f"{where}.table was given along with {where}.images or {where}.masks: choose one")
        return Dataset.from_csv(table)
    if images is None:
        if masks is not None:
            raise ConfigError(f"{where}.masks were given without {where}.images")
        return None
    return Dataset(files(images), None if masks is None else files(masks))


def files(given: Files) -> Any:
    """A pattern, or a list of files."""
    return given if isinstance(given, str) else list(given)


def first_shape(samples: Any) -> tuple[int, ...]:
    """The shape (C, H, W) or (C, D, H, W) of the first image that can be opened."""
    for index in range(len(samples)):
        sample = sample_at(samples, index)
        try:
            return tuple(opened(sample.image, sample.name, open_source).shape)
        except DataError:
            if index == len(samples) - 1:
                raise
    raise ConfigError("the dataset is empty: there is nothing to train on")


@dataclass(frozen=True)
class Fitting:
    """What batches are made for: the ranks, where they compute, the best cuts of images, and the labels of the loss.

    `training` and `held_out` say what this rank takes of the batches of each.
    """

    mesh: Mesh
    device: torch.device
    align: int
    label_range: LabelRange | None
    training: Needs
    held_out: Needs


def training_loader(config: Config, samples: Any, fitting: Fitting) -> Loader:
    """The batches to train on, with every file looked at. Collective."""
    made = loader(config, samples, fitting, batch=config.data.batch, training=True)
    made.check()
    return made


def held_out_loader(config: Config, samples: Any, fitting: Fitting) -> Loader:
    """The held-out images in order, one for each data rank at a time where they have one size. Collective."""
    one, ranks = loader(config, samples, fitting, batch=1, training=False), fitting.mesh.size("data")
    facts = one.check()
    if ranks == 1 or facts.smallest != facts.largest:
        return one
    several = loader(config, samples, fitting, batch=ranks, training=False)
    several.bad += one.bad
    one.close()
    return several


def loader(config: Config, samples: Any, fitting: Fitting, *, batch: int, training: bool) -> Loader:
    """The batches of samples: shuffled, cropped and augmented for training, else in order and whole."""
    data = config.data
    return Loader(
        samples,
        fitting.mesh,
        batch=batch,
        shuffle=data.shuffle and training,
        seed=config.seed,
        augment=config.augment if training else None,
        prefetch=data.prefetch,
        workers=data.workers,
        align=fitting.align,
        device=fitting.device,
        skip_bad=data.skip_bad,
        dtype=getattr(torch, config.model.dtype),
        scale=None if data.scale == "none" else data.scale,
        mean=data.mean,
        std=data.std,
        mask=data.mask,
        labels=data.labels,
        label_range=fitting.label_range,
        level=data.level,
        crop=data.crop if training else None,
        needs=fitting.training if training else fitting.held_out,
    )
