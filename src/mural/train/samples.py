"""The samples that a configuration names, as datasets for training and validation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mural.comm import Mesh
from mural.data import Augment, Dataset, Loader
from mural.errors import ConfigError
from mural.train.config import Config, Files
from mural.train.factory import called, named


def datasets(config: Config) -> tuple[Any, Any]:
    """The samples to train on, and those that are held out (or None)."""
    data, held = config.data, config.validation
    training = one(data.images, data.masks, data.table, "data")
    if data.dataset is not None:
        if training is not None:
            raise ConfigError("data.dataset was given beside data.images or data.table: choose one")
        training = called(named(data.dataset, "data.dataset"), data.arguments, "data.arguments")
    if training is None:
        raise ConfigError('there is nothing to train on: set data.images = "…/*.tif", data.table or data.dataset')
    apart = one(held.images, held.masks, held.table, "validation")
    if apart is None and held.fraction > 0:
        whole = training if isinstance(training, Dataset) else Dataset.of(training[i] for i in range(len(training)))
        training, apart = whole.split(held.fraction, config.seed)
    return training, apart


def one(images: Files | None, masks: Files | None, table: Path | None, where: str) -> Dataset | None:
    """The samples of one table of the configuration."""
    if table is not None:
        if images is not None or masks is not None:
            raise ConfigError(f"{where}.table was given beside {where}.images or {where}.masks: choose one")
        return Dataset.from_csv(table)
    if images is None:
        if masks is not None:
            raise ConfigError(f"{where}.masks were given without {where}.images")
        return None
    return Dataset(files(images), None if masks is None else files(masks))


def files(given: Files) -> Any:
    """A pattern, or a list of files."""
    return given if isinstance(given, str) else list(given)


def loader(config: Config, samples: Any, mesh: Mesh, device: torch.device, align: int, training: bool) -> Loader:
    """The batches of samples: shuffled and augmented for training; else in order, one per data rank at a time."""
    data = config.data
    augment = Augment(**asdict(config.augment)) if training else None
    return Loader(
        samples,
        mesh,
        batch=data.batch if training else max(1, mesh.size("data")),
        shuffle=data.shuffle and training,
        seed=config.seed,
        augment=augment,
        prefetch=data.prefetch,
        workers=data.workers,
        align=align,
        device=device,
        skip_bad=data.skip_bad,
        dtype=getattr(torch, config.model.dtype),
        scale=None if data.scale == "none" else data.scale,
        mean=data.mean,
        std=data.std,
        mask=data.mask,
        level=data.level,
        crop=data.crop if training else None,
    )
