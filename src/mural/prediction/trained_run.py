"""A run that was trained: its configuration, and the checkpoint that predictions are made by, under any plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args

from mural.checkpoint.folder import step_path, steps_in
from mural.checkpoint.manifest import NAME
from mural.errors import CheckpointError, ConfigError
from mural.plans import Plan
from mural.train.best import best_of
from mural.train.config import Config
from mural.train.journal import validations
from mural.train.start import CHECKPOINTS
from mural.train.start_record import RESOLVED


@dataclass(frozen=True)
class TrainedRun:
    """What a run's folder holds of it."""

    folder: Path
    config: Config
    step: int

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.folder / CHECKPOINTS

    def described(self) -> dict[str, str | int]:
        """What tells its checkpoint from all others: also from one of the same step, if the run was trained anew."""
        written = (step_path(self.checkpoints, self.step) / NAME).read_bytes()
        return {"run": str(self.folder.resolve()), "step": self.step, "checkpoint": sha256(written).hexdigest()[:16]}


def config_in(folder: Path) -> Config:
    """The configuration of the run in a folder."""
    if not (folder / RESOLVED).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: there is no {RESOLVED} in it. Give the folder that `mural train` "
            f"wrote to, as runs/run"
        )
    return Config.load(folder / RESOLVED)


def trained_run(folder: Path, step: int | None = None) -> TrainedRun:
    """The run in a folder, with the checkpoint of a step: the given one, else the best, else the last."""
    config = config_in(folder)
    steps = steps_in(folder / CHECKPOINTS)
    if not steps:
        raise CheckpointError(f"{folder / CHECKPOINTS} holds no checkpoint: train the run first")
    if step is not None and step not in steps:
        raise CheckpointError(f"{folder / CHECKPOINTS} holds no step {step}, but {', '.join(map(str, steps))}")
    best = best_of(validations(folder), config) if config.checkpoint.best else None
    known = best.step if best is not None and best.step in steps else steps[-1]
    return TrainedRun(folder, config, known if step is None else step)


Device = Literal["run", "auto", "cuda", "cpu"]
"""Where a prediction is computed: "run" is what the run's configuration says."""


def under(
    config: Config,
    plan: Plan | str | Path | None,
    stream: Sequence[int] | None,
    devices: int,
    device: Device = "run",
    multiple: int = 0,
) -> Config:
    """The configuration for inference: under another plan, in tiles, or on so many local ranks that share each image.

    >>> under(Config(), Plan(spatial=(2, 1)), (512, 512), 0).plan.stream
    (512, 512)
    """
    if device not in get_args(Device):
        raise ConfigError(f'device = "{device}" is not one of {", ".join(get_args(Device))}')
    if multiple < 0:
        raise ConfigError(f"multiple = {multiple}: give what extents are padded to, as 16, or 0 for the run's")
    chosen = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if chosen is None:
        old, apart = config.plan, bool(devices or config.targets.images)
        # What predicts for all domains is one ordinary model, whatever their training was placed on.
        chosen = Plan(stream=old.stream, precision=old.precision, memory=old.memory) if apart else old
    ranks = devices or (0 if plan is not None else config.launch.devices)
    tiles = chosen.stream if stream is None else tuple(stream)
    return replace(
        config,
        data=replace(config.data, skip_bad=False, multiple=multiple or config.data.multiple),
        # Nothing is kept for a backward, so that there is nothing to recompute or to move away.
        plan=replace(chosen, stream=tiles, recompute=(), offload=()),
        launch=replace(config.launch, devices=ranks, device=config.launch.device if device == "run" else device),
    )
