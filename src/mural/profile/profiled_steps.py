"""Measuring a profile: some steps of a run, taken as training takes them, with every rank's waits noted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from mural.comm.failure.agree import gather
from mural.comm.hosts import host
from mural.data import Batch
from mural.errors import TrainingError
from mural.profile.account import Notes, Profile, StepAccount
from mural.ranks import Mesh
from mural.shard.halo.fuse import fusing
from mural.train.config import Config
from mural.train.local_ranks import on_local_ranks
from mural.train.loop import update
from mural.train.signals import StopRequest
from mural.train.start import start
from mural.train.status import Position
from mural.train.training_run import Run

MEETINGS = 9
"""How often ranks of several machines compare their clocks."""


def profile(config: Config, steps: int = 10, warmup: int = 2) -> Profile | None:
    """The profile of some steps of a run from its start, on the first rank; None on others that a launcher started.

    The run trains in a folder that is deleted afterwards: no checkpoint of the real run is read or written.
    """
    with TemporaryDirectory(prefix="mural-profile-") as folder:
        config = replace(
            config,
            folder=Path(folder),
            train=replace(config.train, steps=steps + warmup),
        )
        return on_local_ranks(partial(profile_rank, steps=steps, warmup=warmup), config)


def profile_rank(_: int, config: Config, *, steps: int, warmup: int) -> Profile | None:
    """The same on this rank."""
    with start(config) as run, StopRequest() as stop, fusing(False if config.train.deterministic else None):
        taken = updates(run, stop)
        for _ in range(warmup):
            next(taken)
        shift = clock_shift(run.mesh)
        with run.mesh.transport.trace() as trace:
            found = list(taken)
        notes = Notes(
            run.mesh.rank,
            tuple(step for step, _ in found),
            trace,
            tuple(action for _, actions in found for action in actions),
            shift,
        )
        everyone = gather(run.mesh, notes, "profile")
        title = ", ".join([config.model.factory, *str(run.config.plan).splitlines()])
        return Profile(title, tuple(everyone.values())) if run.mesh.rank == 0 else None


Actions = tuple[tuple[str, float, float], ...]


def updates(run: Run, stop: StopRequest) -> Iterator[tuple[StepAccount, Actions]]:
    """The run's updates as they are taken, with what stages did in them."""
    run.pm.train()
    position, batches, number = Position(), batches_of(run), 0
    while number < run.total:
        run.begins_step(number)
        begin, waited, actions, complete = perf_counter(), 0.0, list[tuple[str, float, float]](), False
        while not complete:
            epoch, batch = next(batches)
            position = Position(number, epoch, batch.step + 1)
            waited, complete = waited + batch.waited, run.completes_update(position)
            loss = run.pm.step(batch.image, batch.target, reduce=complete, weight=run.weight(batch, position))
            actions += run.pm.actions()
            if complete:
                update(run, position, batch, loss, stop)
        if run.pm.device.type == "cuda":
            torch.cuda.synchronize(run.pm.device)
        number += 1
        run.journal.advance(number)
        yield StepAccount(number, begin, perf_counter(), waited), tuple(actions)


def batches_of(run: Run) -> Iterator[tuple[int, Batch]]:
    """The batches of one epoch after the other, with its number."""
    for epoch in count():
        empty = True
        for batch in run.loader.epoch(epoch):
            empty = False
            yield epoch, batch
        if empty:
            raise TrainingError(f"epoch {epoch} has no batch that can be read. {run.loader.summary()}")


def clock_shift(mesh: Mesh) -> float:
    """What to add to this rank's clock for the first rank's: nothing on one machine, else to about a message's time.

    Ranks leave an exchange of all with all at nearly the same moment. Collective.
    """
    hosts = gather(mesh, host(), "machines")
    if len(set(hosts.values())) == 1:
        return 0.0
    left: list[float] = []
    for _ in range(MEETINGS):
        gather(mesh, 0, "clocks")
        left.append(perf_counter())
    everyone = gather(mesh, left, "clocks")
    return median(first - mine for first, mine in zip(everyone[0], left, strict=True))
