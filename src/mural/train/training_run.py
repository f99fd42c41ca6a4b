"""A run: everything that the loop uses, and what it decides: when to save and to validate, and where to go on."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import nan, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from mural.channel.share import shares_among
from mural.checkpoint import Checkpoints, State, restore, state_of
from mural.checkpoint.snapshot import of_first
from mural.checkpoint.state import clean
from mural.comm.failure.agree import gather, together
from mural.comm.watchdog import Watchdog
from mural.data import Batch, Loader
from mural.domain import SeparationNetwork
from mural.engine import Parallel
from mural.errors import CheckpointError, cannot_write
from mural.ranks import Mesh
from mural.train.best import best_of, watched
from mural.train.config import Config
from mural.train.domain_batches import DomainLoader, HeldOutDomains
from mural.train.failing_code import few, naming
from mural.train.journal import Journal, validations
from mural.train.meters import Meter
from mural.train.start_record import RESOLVED, images_of, record_start
from mural.train.status import Position, Status


@dataclass(frozen=True)
class Result:
    """What a run ended with."""

    step: int
    loss: float
    stopped: str
    """What ended the run early, a signal or train.stop_after, or nothing."""
    scores: Mapping[str, Any]
    """Those of the last validation."""
    folder: Path

    def words(self) -> str:
        """The end of a run for a person."""
        how = f"stopped by {self.stopped}" if self.stopped else "finished"
        scores = "".join(f", {n} {v:.4f}" for n, v in self.scores.items() if isinstance(v, float) and n != "loss")
        return f"{how} at step {self.step}: loss {self.loss:.4f}{scores}; everything is in {self.folder}"


@dataclass(frozen=True)
class Beginning:
    """Where a run begins or goes on: its last loss and scores, and whether a validation is owed there."""

    position: Position
    loss: Tensor
    scores: Mapping[str, Any]
    owed: bool


@dataclass
class Run:
    """What the loop uses."""

    config: Config
    mesh: Mesh
    pm: Parallel
    loader: Loader | DomainLoader
    held_out: Loader | HeldOutDomains | None
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    checkpoints: Checkpoints
    journal: Journal
    meter: Meter
    watchdog: Watchdog
    status: Status
    total: int
    doing: str = ""
    enough: str = ""
    """Why the run ends before its last update, or nothing."""

    # -- batches and updates ------------------------------------------------------------------------------------------

    def completes_update(self, position: Position) -> bool:
        """Whether the batch that was just taken is the last of its update."""
        last = position.batch == self.loader.steps_per_epoch
        return last or position.batch % self.config.train.accumulate == 0

    def weight(self, batch: Batch, position: Position) -> float:
        """The part of the batch's images in those of its update."""
        per, size, every = self.config.train.accumulate, self.config.data.batch, len(self.loader.dataset)
        first = (position.batch - 1) // per * per * size
        images = min(every, first + per * size) - first
        return batch.shape[0] / images if per > 1 else 1.0

    @property
    def batches(self) -> dict[str, int]:
        """What decides which images are in which batch of an epoch."""
        data = self.config.data
        return {"samples": len(self.loader.dataset), "batch": data.batch, "seed": self.config.seed}

    def due(self, position: Position, every: int) -> bool:
        """Whether something that happens every few updates is due now."""
        return every > 0 and position.step % every == 0

    def validates(self, position: Position) -> bool:
        """Whether the held-out images are looked at after this update, before the next."""
        return self.held_out is not None and self.due(position, self.config.validation.every)

    @property
    def validates_epochs(self) -> bool:
        """Whether they are looked at after every epoch."""
        return self.held_out is not None and self.config.validation.every == 0

    def judge(self) -> None:
        """Look at all validations so far: keep the best one's checkpoint; enough is enough. Collective."""
        if not watched(self.config):
            return
        with together(self.mesh, "reading the journal"):
            mine = validations(self.config.folder) if self.mesh.rank == 0 else []
        # Not by the checkpoints' group: a save may be under way there.
        found = best_of(gather(self.mesh, mine, "validations")[0], self.config)
        patience = self.config.train.stop_after
        if found is None:
            return
        if self.config.checkpoint.best:
            self.checkpoints.best = found.step
        if 0 < patience <= found.since:
            self.enough = f"train.stop_after: no better {found.score} in {found.since} validations"
            self.journal.say(f"{self.enough}; the best was {found.value:.4f} after step {found.step}")

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, position: Position, loss: Tensor, *, wait: bool = False) -> None:
        """Begin to save everything that a resumed run needs; with `wait`, end it too. Collective."""
        with self.watchdog.pause():
            if self.status.saved != position.step:
                self.pm.synchronise(self.optimizer)
                state = self.state()
                counts = {"calls": self.pm.calls, "updates": self.pm.updates}
                values = {**state.values, "position": asdict(position), "counts": counts, "loss": float(loss)}
                values["batches"] = self.batches
                tensors = {**state.tensors, "random.cpu": torch.get_rng_state()}
                self.checkpoints.save(position.step, tensors, values)
                self.status.saved = position.step
                self.status.tell("running")
            if wait:
                self.checkpoints.wait()

    def state(self) -> State:
        """Model, optimizer and schedule as they are now. Collective."""
        parted = None if self.pm.stage_ranks.alone else self.mesh
        terms = self.pm.loss_terms
        with terms.attached(), self.pm.whole_extra_states():
            found = state_of(self.pm.module, self.optimizer, self.schedule, mesh=parted)
        if terms:
            found.values["model"]["loss"] = [clean(name) for name in terms.state_keys()]
        return found

    def begin(self) -> Beginning:
        """Where the run begins, or goes on from the newest intact checkpoint, which is loaded. Collective.

        Nothing in the run's folder changes before it is known that the run is not refused.
        """
        found = self.resume()
        self.state()  # raises where a checkpoint could not hold it
        with together(self.mesh, "the start of the run"):
            try:
                if self.mesh.rank == 0:
                    self.config.save(self.config.folder / RESOLVED)
                    self.status.begin(found.position)
                self.journal.open(found.position.step)
            except OSError as error:
                raise cannot_write(f"the run's file {error.filename2 or error.filename}", error) from error
        self.status.begun, self.status.position = True, found.position
        record_start(
            self.config, self.mesh, self.pm.device, step=found.position.step, total=self.total, weights=self.weights,
            images=images_of(self.loader, self.held_out), before=self.status.before,
        )  # fmt: skip
        if not found.owed:
            self.judge()
        return found

    def resume(self) -> Beginning:
        """Where the newest intact checkpoint stands, which is loaded; or the start. Collective."""
        wanted, found = self.config.checkpoint.resume, of_first(self.checkpoints.group, self.checkpoints.latest)
        if wanted == "never" and found is not None:
            raise CheckpointError(
                f'{self.checkpoints.folder} holds step {found}, but checkpoint.resume = "never": give this run a '
                "folder of its own (--folder …), or resume"
            )
        if found is None:
            return Beginning(Position(), torch.tensor(nan), {}, owed=False)
        try:
            snapshot = self.checkpoints.read()
            with self.pm.loss_terms.attached():
                restore(snapshot, self.pm.module, self.optimizer, self.schedule)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. To begin anew, give the run another folder (--folder …)") from error
        for text in snapshot.passed_over:
            self.journal.say(f"warning: {text}")
        torch.set_rng_state(snapshot.tensor("random.cpu"))
        counts = snapshot.values["counts"]
        self.pm.calls, self.pm.updates = counts["calls"], counts["updates"]
        saved, batches = Position(**snapshot.values["position"]), snapshot.values["batches"]
        ended = saved.batch in (0, -(-batches["samples"] // batches["batch"]))
        position = saved
        if saved.batch and (ended or batches != self.batches):
            position = replace(saved, epoch=saved.epoch + 1, batch=0)
        if not ended and batches != self.batches:
            self.journal.say(f"the batches are others than those of the checkpoint: on with epoch {position.epoch}")
        self.status.saved = position.step
        self.journal.say(f"resumed from step {position.step}")
        last, scores = of_first(self.checkpoints.group, lambda: self.journal.validated(position.step))
        here = ended or position.step == self.total
        owed = self.validates(position) or (self.validates_epochs and here)
        loss = torch.tensor(float(snapshot.values["loss"]))
        return Beginning(position, loss, scores, owed and last != position.step)

    def kept(self) -> str:
        """What of the run is safe, in words; a save that is under way is waited for. Collective."""
        with suppress(CheckpointError):  # what is said then is what there is
            self.checkpoints.wait()
        steps = self.checkpoints.steps()
        return f"Step {steps[-1]} is saved in {self.checkpoints.folder}" if steps else "Nothing was saved yet"

    def prove(self, batch: Batch) -> None:
        """Before the first step, prove the plan for batches such as this one, and say what was proved. Collective."""
        if self.pm.prover is not None:
            with self.watchdog.pause(), self.naming(batch, "the proof of the plan"):
                proof = self.pm.prove(batch.image, batch.target)
            for line in str(proof).splitlines():
                self.journal.say(line)

    @contextmanager
    def naming(self, batch: Batch, doing: str) -> Generator[None]:
        """A block whose errors name the layer, and the images that were computed on."""
        with naming(doing, f"images of shape {tuple(batch.shape)} ({self.names(batch)})", self.pm.plain):
            yield

    def names(self, batch: Batch) -> str:
        """The names of a batch's images, of which only the first few are told."""
        return few(batch.names)

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        """How many numbers the parameters of the whole model have."""
        shares = {id(p): share for p, share in shares_among(self.pm.plain.parameters())}
        whole = (shares[id(p)].shape if id(p) in shares else p.shape for p in self.pm.plain.parameters())
        return sum(map(prod, whole))

    def introduce(self) -> None:
        """Say what is about to happen."""
        held = f", {len(self.held_out.dataset)} held out" if self.held_out is not None else ""
        self.journal.say(
            f"{self.config.model.factory}, {self.weights:,} weights; {len(self.loader.dataset)} samples{held}; "
            f"{self.total} updates; {', '.join(str(self.config.plan).splitlines())}; in {self.config.folder}"
        )
        if (ranks := self.config.plan.data) > (batch := self.config.data.batch):
            self.journal.say(
                f"warning: plan.data = {ranks} divides batches of data.batch = {batch}, so that {ranks - batch} of "
                f"{ranks} parts of the ranks have no image: set data.batch = {ranks}, or plan.data = {batch}"
            )

    def begins_step(self, step: int) -> None:
        """Take note of the step that begins, counted from 0; a separation network's ramp stands where it does in it."""
        self.begins(f"step {step + 1}")
        if isinstance(self.pm.plain, SeparationNetwork):
            self.pm.plain.at(step)

    def begins(self, doing: str) -> None:
        """Take note of what is done from here on, such as "step 12"; the watchdog knows it too."""
        self.doing = doing
        self.watchdog.progress(doing)

    def tile_done(self, done: int, of: int, name: str) -> None:
        """Say how far a pass over streamed images is; the model calls it after each tile."""
        text = f"{self.doing}: tile {done} of {of} ({name})"
        self.watchdog.progress(text)
        self.journal.under_way(text)

    def report(self, position: Position, norm: float) -> None:
        """Report how training goes, every few updates and at the end. Collective."""
        self.status.position = position
        self.meter.updates += 1
        self.journal.advance(position.step)
        if position.step % self.config.log.every and position.step != self.total:
            return
        rate: Any = self.optimizer.param_groups[0]["lr"]
        reading = self.meter.read(position.step, position.epoch, float(rate), norm)
        self.journal.note("train", position.step, reading.values(), reading.scalars())
        self.journal.show(position.step, reading.words())
        self.meter.clear()

    def result(self, position: Position, loss: Tensor, scores: Mapping[str, Any], stopped: str) -> Result:
        """The end of the run, which is written down too."""
        found = Result(position.step, float(loss), stopped, scores, self.config.folder)
        self.status.position = position
        more: dict[str, Any] = {"loss": found.loss, "scores": dict(scores), "bad": [asdict(b) for b in self.loader.bad]}
        self.status.tell("stopped" if stopped else "finished", by=stopped, **more)
        if self.loader.bad:
            self.journal.say(self.loader.summary())
        return found
