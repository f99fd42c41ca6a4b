"""The samples that a configuration names, as datasets for training and validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mural.data import Dataset, Loader, Sample
from mural.data import open as open_source
from mural.data.image_sample import label_of, opened, sample_at
from mural.data.loading.label_range import LabelRange
from mural.engine.inputs import Needs
from mural.errors import ConfigError, DataError
from mural.ranks import Mesh
from mural.train.config import Config, Files
from mural.train.configured_loss import LOSSES
from mural.train.domain_batches import DomainLoader, HeldOutDomains
from mural.train.failing_code import told_in_one_line
from mural.train.named_callables import called, named

SOURCE = ""
"""The name of what [data] describes among the splits: the only one, or the source of a separation network."""


@dataclass(frozen=True)
class Split:
    """The samples of a domain to train on, and those that are held out (or None)."""

    training: Any
    held_out: Any


def datasets(config: Config) -> dict[str, Split]:
    """The samples of the configuration: those of [data], and those of each target by its name."""
    data, held = config.data, config.validation
    training = one(data.images, data.masks, data.table, "data", data.classes)
    if data.dataset is not None:
        if training is not None:
            raise ConfigError("data.dataset was given along with data.images or data.table: choose one")
        training = called(named(data.dataset, "data.dataset"), data.arguments, "data.arguments")
        if not hasattr(training, "__len__") or not hasattr(training, "__getitem__"):
            raise ConfigError(
                f'data.dataset = "{data.dataset}" gave a {type(training).__name__}: return something with len() and '
                f"[i], as mural.data.Dataset"
            )
    if training is None:
        raise ConfigError('there is nothing to train on: set data.images = "…/*.tif", data.table or data.dataset')
    apart = one(held.images, held.masks, held.table, "validation", data.classes)
    found = {SOURCE: split(config, training, apart)}
    return found | targets(config)


def targets(config: Config) -> dict[str, Split]:
    """The samples of each target domain; those to train on have no labels."""
    given, found = config.targets, dict[str, Split]()
    for table in (given.held_out_images, given.held_out_masks, given.held_out_tables):
        if unknown := set(table) - set(given.images):
            raise ConfigError(f"targets: {sorted(unknown)} have held-out files, but no images to train on")
    for name, images in given.images.items():
        table = given.held_out_tables.get(name)
        path = None if table is None else Path(str(table))
        images_apart, masks_apart = given.held_out_images.get(name), given.held_out_masks.get(name)
        apart = one(images_apart, masks_apart, path, f"targets.{name}", config.data.classes)
        found[name] = split(config, Dataset(files(images)), apart)
    return found


def split(config: Config, training: Any, apart: Dataset | None) -> Split:
    """The samples with a part of them held out, unless others are; repeated as the configuration says."""
    if apart is None and config.validation.fraction > 0:
        whole = training if isinstance(training, Dataset) else Dataset.of(training[i] for i in range(len(training)))
        training, apart = whole.split(config.validation.fraction, config.seed)
    repeat = config.data.repeat
    return Split(training if repeat == 1 else Repeated(training, repeat), apart)


class Repeated:
    """A dataset several times over."""

    def __init__(self, samples: Any, times: int):
        self.samples, self.times = samples, times

    def __len__(self) -> int:
        return len(self.samples) * self.times

    def __getitem__(self, index: int) -> Sample:
        return sample_at(self.samples, index % len(self.samples))


def one(
    images: Files | None, masks: Files | None, table: Path | None, where: str, classes: Sequence[str]
) -> Dataset | None:
    """The samples of one table of the configuration; labels may be written as the names of classes."""
    if table is not None:
        if images is not None or masks is not None:
            raise ConfigError(f"{where}.table was given along with {where}.images or {where}.masks: choose one")
        return Dataset.from_csv(table, classes=classes or None)
    if images is None:
        if masks is not None:
            raise ConfigError(f"{where}.masks were given without {where}.images: set these too")
        return None
    return Dataset(files(images), None if masks is None else files(masks))


def files(given: Files) -> Any:
    """A pattern, or a list of files."""
    return given if isinstance(given, str) else list(given)


def first_shape(samples: Any) -> tuple[int, ...]:
    """The shape (C, H, W) or (C, D, H, W) of the first image that can be opened."""
    for index in range(len(samples)):
        with told_in_one_line(f"sample {index} of the dataset"):
            sample = sample_at(samples, index)
        try:
            return tuple(opened(sample.image, sample.name, open_source).shape)
        except DataError:
            if index == len(samples) - 1:
                raise
    raise ConfigError("the dataset is empty: there is nothing to train on")


def check_targets(config: Config, training: Any) -> None:
    """Raise where a loss of mural's list has nothing to compare with; one of the user's own may need nothing."""
    if config.loss.name in LOSSES and sample_at(training, 0).target is None:
        raise ConfigError(
            f'the images have no masks and no labels, which loss.name = "{config.loss.name}" compares with: set '
            f'data.masks = "…/*.png", or data.table to a CSV file with the columns image and mask or label'
        )


def with_kind_of_labels(config: Config, training: Any) -> Config:
    """The configuration, whose data.mask says that labels of whole images are values where they are fractions."""
    label = label_of(sample_at(training, 0).target)
    if config.data.mask != "classes" or label is None or not label.is_floating_point():
        return config
    return replace(config, data=replace(config.data, mask="values"))


@dataclass(frozen=True)
class Fitting:
    """What batches are made for: the ranks, where they compute, the best cuts of images, and the labels of the loss.

    `padding` is what masks are padded with, which the loss does not count; None where it would. `training` and
    `held_out` say what this rank takes of the batches of each.
    """

    mesh: Mesh
    device: torch.device
    align: int
    label_range: LabelRange | None
    padding: float | None
    training: Needs
    held_out: Needs


def image_shape(config: Config, split: Split) -> tuple[int, ...]:
    """The shape of the images that a model is trained on: of the first, or of what is cut out of it, padded."""
    channels, *extents = first_shape(split.training)
    crop = config.data.crop
    if crop is not None and (len(crop) != len(extents) or min(crop) < 1):
        raise ConfigError(
            f"data.crop = {list(crop)} for images of {' × '.join(map(str, extents))}: give {len(extents)} sizes of at "
            f"least 1, as {extents}"
        )
    return (channels, *padded(config.data.crop or extents, config.data.multiple))


def padded(extents: Sequence[int], multiple: int) -> tuple[int, ...]:
    """The extents, rounded up to a multiple.

    >>> padded((1500, 1200), 16)
    (1504, 1200)
    """
    return tuple(-(-extent // multiple) * multiple for extent in extents)


def training_batches(config: Config, splits: Mapping[str, Split], fittings: Sequence[Fitting]) -> Loader | DomainLoader:
    """The batches to train on, of one domain or of several. Collective."""
    pairs = zip(splits.items(), fittings, strict=True)
    loaders = {name: training_loader(config, split.training, fitting) for (name, split), fitting in pairs}
    return loaders[SOURCE] if len(loaders) == 1 else DomainLoader(loaders)


def held_out_batches(
    config: Config, splits: Mapping[str, Split], fittings: Sequence[Fitting]
) -> Loader | HeldOutDomains | None:
    """The held-out images, of one domain or of all; None if there are none. Collective."""
    without = [name for name, split in splits.items() if split.held_out is None]
    if len(without) == len(splits):
        return None
    if without:
        names = [name or "the source" for name in without]
        raise ConfigError(
            f"{names} have no held-out images, but other domains have: a validation takes images of every domain; set "
            f"validation.images and targets.held_out_images for all, or validation.fraction"
        )
    if len(splits) == 1:
        return held_out_loader(config, splits[SOURCE].held_out, fittings[0])
    pairs = zip(splits.items(), fittings, strict=True)
    # One image at a time whatever the plan: the terms of a separation network depend on what is in a batch.
    return HeldOutDomains({name: single_loader(config, split.held_out, fitting) for (name, split), fitting in pairs})


def training_loader(config: Config, samples: Any, fitting: Fitting) -> Loader:
    """The batches to train on, with every file looked at. Collective."""
    made = loader(config, samples, fitting, batch=config.data.batch, training=True)
    facts, data = made.check(), config.data
    sizes = [padded(extents, data.multiple) for extents in (facts.smallest, facts.largest)]
    if data.batch > 1 and data.shuffle and data.crop is None and sizes[0] != sizes[1]:
        raise ConfigError(
            f"images of {' × '.join(map(str, facts.smallest))} and {' × '.join(map(str, facts.largest))} would come "
            f"into one batch of {data.batch}: set data.batch = 1, or cut all to one size by data.crop = "
            f"{list(facts.smallest)}"
        )
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


def single_loader(config: Config, samples: Any, fitting: Fitting) -> Loader:
    """The held-out images in order, one at a time. Collective."""
    made = loader(config, samples, fitting, batch=1, training=False)
    made.check()
    return made


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
        pad_to=data.multiple,
        pad_target=fitting.padding if data.multiple > 1 else 0,
        needs=fitting.training if training else fitting.held_out,
    )
