"""The tables of a configuration that say how a run goes: how long, what it saves, what it shows, and where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainConfig:
    """[train]: how long, and how."""

    epochs: int = 1
    """Passes over the data."""
    steps: int = 0
    """Updates after which the run ends; 0: when the epochs are over."""
    accumulate: int = 1
    """Batches whose gradients are added up for one update."""
    clip: float = 0.0
    """The largest norm of the gradient; 0: any."""
    stop_after: int = 0
    """Validations without a better checkpoint.best (without one: loss) after which the run ends; 0: never."""
    prove: bool = True
    """Compare a small case of the plan with one device before the first step, and raise where they differ."""
    deterministic: bool = True
    """Leave out what is decided by measurements of speed, so that a resumed run repeats every bit."""


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: what survives."""

    every: int = 100
    """Updates between checkpoints, besides those before each validation and at the end; 0: these alone."""
    keep: int = 3
    """How many are kept."""
    best: str = ""
    """A score of validations, as mean_iou: the checkpoint of the best one is kept too, and `mural predict` takes it."""
    best_is: Literal["auto", "max", "min"] = "auto"
    """Whether the highest or the lowest is the best; auto: the lowest of losses and errors, the highest of others."""
    asynchronous: bool = True
    """Write while training goes on."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Go on from the newest checkpoint in the run's folder: if there is one, never, or fail without one."""


@dataclass(frozen=True)
class LogConfig:
    """[log]: what is seen."""

    every: int = 10
    """Updates between lines of metrics."""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """Write TensorBoard files: where the package is there, always, or not."""
    progress: bool = True
    """Show a progress bar on a terminal."""


@dataclass(frozen=True)
class LaunchConfig:
    """[launch]: where it runs; under torchrun, mpirun or srun the ranks are theirs."""

    devices: int = 0
    """Local ranks to start; 0: as many as the plan needs."""
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """How messages travel."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    restarts: int = 0
    """How often local ranks are started again after a failure."""
    hang: float = 600.0
    """Seconds without progress after which a rank counts as hung; 0: never."""
