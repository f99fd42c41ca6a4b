"""The training loop, from top to bottom: resume, read, step, update, report, save, validate, leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from torch import Tensor

from mural.comm.failure.agree import any_rank
from mural.data import Batch
from mural.errors import TrainingError
from mural.shard.halo.fuse import fusing
from mural.train.config import Config
from mural.train.finite import first_bad
from mural.train.local_ranks import on_local_ranks
from mural.train.signals import StopRequest
from mural.train.start import start
from mural.train.status import Position, told_of_ranks
from mural.train.training_run import Result, Run
from mural.train.validate import validate


class Trainer:
    """Trains what a configuration describes, on the ranks that it finds or starts.

    >>> trainer = Trainer({"train": {"steps": 3}})
    >>> trainer.config.train.steps
    3
    """

    def __init__(self, config: Config | Mapping[str, Any] | str | Path):
        if isinstance(config, (str, Path)):
            config = Config.load(config)
        self.config = config if isinstance(config, Config) else Config.of(config)

    def fit(self) -> Result:
        """Train to the end, on every rank; without a launcher, on as many local ranks as the run asks for."""
        with told_of_ranks(self.config.folder):
            return on_local_ranks(fit_rank, self.config)


def fit_rank(_: int, config: Config) -> Result:
    """Train on this rank."""
    fused = fusing(False if config.train.deterministic else None)
    with start(config, prove=config.train.prove) as run, StopRequest() as stop, fused, run.status.told():
        return train(run, stop)


def train(run: Run, stop: StopRequest) -> Result:
    """The loop. Every rank takes the same turns in it."""
    config, pm = run.config, run.pm
    run.introduce()
    found = run.begin()
    position, loss = found.position, found.loss
    scores = validate(run, position.step) if found.owed else found.scores
    while position.step < run.total and not run.enough:
        pm.train()
        for batch in run.loader.epoch(position.epoch, position.batch):
            position = replace(position, batch=batch.step + 1)
            run.begins_step(position.step)
            complete, weight = run.completes_update(position), run.weight(batch, position)

            run.prove(batch)
            with run.naming(batch, f"step {position.step + 1} (epoch {position.epoch})"):
                loss = pm.step(batch.image, batch.target, reduce=complete, weight=weight)
            run.meter.add(batch.shape, loss, weight, batch.waited)
            if not complete:
                continue

            norm, leaving = update(run, position, batch, loss, stop)
            position = replace(position, step=position.step + 1)
            run.report(position, norm)
            if leaving:
                run.save(position, loss, wait=True)
                run.journal.say(f"{stop.name or 'a signal'}: step {position.step} is saved, leaving")
                return run.result(position, loss, scores, stop.name or "a signal to another rank")
            # What a validation may meet does not cost the updates before it.
            if run.due(position, config.checkpoint.every) or run.validates(position):
                run.save(position, loss)
            if run.validates(position):
                scores = validate(run, position.step)
            if position.step == run.total or run.enough:
                break
        else:
            if position.batch == 0:
                raise TrainingError(f"epoch {position.epoch} has no batch that can be read. {run.loader.summary()}")
            position = replace(position, epoch=position.epoch + 1, batch=0)
        if run.validates_epochs:
            run.save(position, loss)
            scores = validate(run, position.step)
    run.save(position, loss, wait=True)
    return run.result(position, loss, scores, run.enough)


def update(run: Run, position: Position, batch: Batch, loss: Tensor, stop: StopRequest) -> tuple[float, bool]:
    """The gradient's norm, and whether a rank was asked to leave; the weights have taken their step. Collective."""
    norm = float(run.pm.clip_grad_norm_(run.config.train.clip or inf))
    bad, leaving = any_rank(run.mesh, not isfinite(norm + float(loss)), bool(stop))
    if bad:
        raise not_finite(run, position, batch, float(loss), norm)
    run.optimizer.step()
    run.schedule.step()
    run.pm.updated(run.optimizer)
    run.pm.zero_grad()
    return norm, leaving


def not_finite(run: Run, position: Position, batch: Batch, loss: float, norm: float) -> TrainingError:
    """The error for a step whose loss or gradient is not a number, with the layer that it came from. Collective."""
    where = first_bad(run.pm, batch.image, batch.target, run.mesh)
    return TrainingError(
        f"step {position.step + 1} (epoch {position.epoch}, {run.names(batch)}): the loss is {loss}, the norm of "
        f"the gradient {norm}: {where}. {run.kept()}. Lower optimizer.lr, set train.clip, or look at these images"
    )
