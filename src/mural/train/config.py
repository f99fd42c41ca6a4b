"""The configuration of a training run: typed, frozen, in and out of TOML; each field is a flag of `mural train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mural.data import Augment, Source
from mural.data import scaled as scaled_source
from mural.errors import ConfigError
from mural.plans import Plan
from mural.text_files import save_text
from mural.train.run_tables import CheckpointConfig, LaunchConfig, LogConfig, TrainConfig
from mural.train.target_domains import Files, TargetsConfig
from mural.typed import build, dump, read_toml

Arguments = dict[str, Any]
Labels = dict[int, int]


def no_arguments() -> Arguments:
    """An empty table."""
    return {}


def no_labels() -> Labels:
    """No label is renamed."""
    return {}


@dataclass(frozen=True)
class ModelConfig:
    """[model]: what is trained."""

    factory: str = "mural.models:UNet"
    """Where the model comes from: "package.module:callable", or "path/to/file.py:callable"."""
    arguments: Arguments = field(default_factory=no_arguments)
    """Keyword arguments of the factory."""
    weights: Path | None = None
    """A safetensors file to start from."""
    dtype: Literal["float32", "float64"] = "float32"
    """The type of the weights."""
    compile: bool = False
    """Whether the model goes through torch.compile; operations on cut images run as they are."""


@dataclass(frozen=True)
class DataConfig:
    """[data]: which images, with which masks or labels, and how they are read."""

    images: Files | None = None
    """Image files: a glob, or a list of files and globs."""
    masks: Files | None = None
    """Mask files, matched to the images by name."""
    table: Path | None = None
    """A CSV file with the columns image and mask, or image and label; paths are relative to it."""
    dataset: str | None = None
    """A dataset of your own: "package.module:callable", which returns something with len() and [i] -> Sample."""
    arguments: Arguments = field(default_factory=no_arguments)
    """Keyword arguments of that callable."""
    level: int = 0
    """The pyramid level that is read; 0 is the finest."""
    batch: int = 1
    """Images per step, over all ranks."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    scale: Literal["range", "none"] | float = "range"
    """Integer images are scaled to [0, 1] by the range of their type, divided by a number, or taken as they are."""
    mean: tuple[float, ...] | None = None
    """Subtracted from each channel, after scaling."""
    std: tuple[float, ...] | None = None
    """What each channel is divided by, after scaling."""
    crop: tuple[int, ...] | None = None
    """Train on random boxes of this size instead of whole images; smaller images are padded with zeros."""
    multiple: int = 1
    """Images are padded with zeros at their ends to multiples of this; padding counts in no loss, score or file."""
    repeat: int = 1
    """How often each image comes in an epoch, each time with another crop and augmentation."""
    mask: Literal["classes", "values", "channels"] = "classes"
    """What masks hold: a class per position, a value per position, or a value per channel and position."""
    labels: Labels = field(default_factory=no_labels)
    """What values of masks, or labels, become, as { 255 = 1 }; others stay as they are."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in order, as ["background", "tissue"]: scores are told under them; tables may have them."""
    prefetch: int = 2
    """Batches that are read ahead."""
    workers: int = 2
    """Threads that decode, on each rank."""
    skip_bad: bool = False
    """Leave out samples that cannot be read (of streamed images, that cannot be opened), and list them at the end;
    what can be read and does not fit, such as a mask with an unknown class, ends the run all the same."""

    def scaled(self, source: Source) -> Source:
        """An image as this run's training reads it: for `pm(…)` with the weights of the run."""
        return scaled_source(source, self.scale, self.mean, self.std)


@dataclass(frozen=True)
class ValidationConfig:
    """[validation]: what is held out, and what is done with it."""

    images: Files | None = None
    """Image files, as in [data]."""
    masks: Files | None = None
    """Mask files, as in [data]."""
    table: Path | None = None
    """A CSV file, as in [data]."""
    fraction: float = 0.0
    """The part of the training samples that is held out instead, drawn by the seed."""
    every: int = 0
    """Updates between validations; 0: at the end of every epoch."""
    write: Literal["", "zarr", "tiff"] = ""
    """Write the predictions of whole images, piece by piece: as OME-Zarr, as TIFF, or not."""


@dataclass(frozen=True)
class AugmentConfig(Augment):
    """[augment]: random changes of training images with values in [0, 1], the same whatever the plan; else none."""

    flips: bool = False
    rotations: bool = False


@dataclass(frozen=True)
class LossConfig:
    """[loss]: what is minimised."""

    name: str = "cross_entropy"
    """cross_entropy, bce, dice, mse, l1, smooth_l1, or "package.module:callable" of output and target, or a class of
    such, as "monai.losses:DiceCELoss"."""
    arguments: Arguments = field(default_factory=no_arguments)
    """Keyword arguments of the loss, or of its class; a list of numbers becomes a tensor (class weights)."""


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: how the weights change."""

    name: str = "AdamW"
    """A class of torch.optim."""
    lr: float = 1e-3
    """The learning rate, before the schedule."""
    arguments: Arguments = field(default_factory=no_arguments)
    """Further keyword arguments."""


@dataclass(frozen=True)
class ScheduleConfig:
    """[schedule]: how the learning rate changes over the updates."""

    name: Literal["constant", "linear", "cosine", "polynomial", "step"] = "constant"
    """After the warm-up: constant; to `final` linearly, as a cosine or a polynomial; or by `factor` every `period`."""
    warmup: int = 0
    """Updates in which the rate rises from near zero."""
    final: float = 0.0
    """The rate at the end, as a part of the rate at the start."""
    power: float = 0.9
    """The polynomial's exponent."""
    period: int = 1000
    """Updates between steps."""
    factor: float = 0.1
    """What a step multiplies the rate by."""


@dataclass(frozen=True)
class Config:
    """A training run. `Config.load("run.toml")` reads one; `save` writes it with every default filled in."""

    folder: Path = Path("runs/run")
    """Where everything is written."""
    seed: int = 0
    """Of weights, order, augmentations and dropout."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: Plan = field(default_factory=Plan)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            table, _, key = name.partition(".")
            value = getattr(getattr(self, table), key)
            if value < least:
                raise ConfigError(f"{name} = {value}: the least is {least}")
        if not 0 <= self.validation.fraction < 1:
            raise ConfigError(f"validation.fraction = {self.validation.fraction}: give a part of 1, as 0.2")
        if not isinstance(self.data.scale, str) and self.data.scale <= 0:
            raise ConfigError(
                f"data.scale = {self.data.scale}: images are divided by it: give a number above 0, as 255"
            )
        if not SEEDS[0] <= self.seed <= SEEDS[1]:
            raise ConfigError(f"seed = {self.seed}: torch takes seeds from {SEEDS[0]} to {SEEDS[1]}")

    @classmethod
    def load(cls, path: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
        """The configuration in a TOML file, with some fields changed, as {"optimizer.lr": 0.1}."""
        return cls.of(merged(with_plan_file(read_toml(path), Path(path).parent), changes or {}))

    @classmethod
    def of(cls, given: Mapping[str, Any], beside: Path = Path()) -> Config:
        """The configuration from tables; `plan` may name a file, relative to `beside`."""
        return build(cls, with_plan_file(given, beside))

    def save(self, path: str | Path) -> None:
        """Write every field to a TOML file."""
        save_text(path, dump(self))

    def with_plan(self, plan: Plan) -> Config:
        """The same run under another plan."""
        return replace(self, plan=plan)


LEAST: dict[str, float] = {
    "data.batch": 1,
    "data.prefetch": 0,
    "data.workers": 1,
    "data.level": 0,
    "data.repeat": 1,
    "data.multiple": 1,
    "train.epochs": 1,
    "train.steps": 0,
    "train.accumulate": 1,
    "train.stop_after": 0,
    "train.clip": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "log.every": 1,
    "validation.every": 0,
    "launch.devices": 0,
    "launch.restarts": 0,
    "launch.hang": 0,
    "schedule.warmup": 0,
    "schedule.period": 1,
    "schedule.final": 0,
    "schedule.power": 0,
    "schedule.factor": 0,
    "optimizer.lr": 0,
}
"""The smallest value that makes sense."""
SEEDS = -(2**63), 2**64 - 1
"""What torch takes."""


def with_plan_file(tables: Mapping[str, Any], beside: Path) -> dict[str, Any]:
    """The tables of a run, with those of the plan's file in place of its name, which is relative to a folder."""
    given = tables.get("plan")
    return {**tables, "plan": read_toml(beside / given)} if isinstance(given, str) else dict(tables)


def merged(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with values at dotted names replaced.

    >>> merged({"a": {"b": 1}}, {"a.b": 2, "c": 3})
    {'a': {'b': 2}, 'c': 3}
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tables.items()}
    for name, value in changes.items():
        table, _, key = name.partition(".")
        if not key:
            result[table] = value
        elif isinstance(result.setdefault(table, {}), dict):
            result[table][key] = value
        else:
            raise ConfigError(f"{name} was given, but {table} is {result[table]!r} not a table")
    return result
