"""A run: everything that the loop uses, built in one order from the configuration, and closed together."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import nan, prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from mural.checkpoint import Checkpoints, State, restore, state_of
from mural.comm import Mesh, init
from mural.comm.agree import together
from mural.comm.launch import placement
from mural.comm.watchdog import Watchdog
from mural.data import Batch, Loader
from mural.engine import Parallel
from mural.errors import CheckpointError, ConfigError
from mural.parallelize import mesh_of, parallelize
from mural.plan import Plan
from mural.shard.channel_share import shares_among
from mural.train.config import Config
from mural.train.factory import load_weights, make_loss, make_model, make_optimizer, make_schedule
from mural.train.journal import Journal
from mural.train.meters import Meter
from mural.train.samples import datasets, first_shape, held_out_loader, training_loader

CHECKPOINTS, RESOLVED, STATUS = "checkpoints", "config.toml", "status.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands: updates taken, the epoch, and the batches of it that were used."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Result:
    """What a run ended with."""

    step: int
    loss: float
    stopped: str
    """The signal that asked the run to leave early, or nothing."""
    scores: Mapping[str, Any]
    """Those of the last validation."""
    folder: Path

    def words(self) -> str:
        """The end of a run for a person."""
        how = f"stopped by {self.stopped}" if self.stopped else "finished"
        scores = "".join(f", {n} {v:.4f}" for n, v in self.scores.items() if isinstance(v, float) and n != "loss")
        return f"{how} at step {self.step}: loss {self.loss:.4f}{scores}; everything is in {self.folder}"


@dataclass
class Run:
    """What the loop uses; `saved` is the step of the last checkpoint that was begun or read."""

    config: Config
    mesh: Mesh
    pm: Parallel
    loader: Loader
    held_out: Loader | None
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    checkpoints: Checkpoints
    journal: Journal
    meter: Meter
    watchdog: Watchdog
    total: int
    saved: int | None = None

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
        return int(batch.image.shape[0]) / images if per > 1 else 1.0

    @property
    def batches(self) -> dict[str, int]:
        """What decides which images are in which batch of an epoch."""
        data = self.config.data
        return {"samples": len(self.loader.dataset), "batch": data.batch, "seed": self.config.seed}

    def due(self, position: Position, every: int) -> bool:
        """Whether something that happens every so many updates happens now."""
        return every > 0 and position.step % every == 0

    def validates(self, position: Position) -> bool:
        """Whether the held-out images are looked at after this update."""
        return self.held_out is not None and self.due(position, self.config.validation.every)

    @property
    def validates_epochs(self) -> bool:
        """Whether they are looked at after every epoch."""
        return self.held_out is not None and self.config.validation.every == 0

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, position: Position, loss: Tensor, *, wait: bool = False) -> None:
        """Begin to save everything that a resumed run needs; with `wait`, end it too. Collective."""
        with self.watchdog.pause():
            if self.saved != position.step:
                self.pm.synchronise(self.optimizer)
                state = self.state()
                counts = {"calls": self.pm.calls, "updates": self.pm.updates}
                values = {**state.values, "position": asdict(position), "counts": counts, "loss": float(loss)}
                values["batches"] = self.batches
                tensors = {**state.tensors, "random.cpu": torch.get_rng_state()}
                self.checkpoints.save(position.step, tensors, values)
                self.saved = position.step
            if wait:
                self.checkpoints.wait()

    def state(self) -> State:
        """Model, optimizer and schedule as they are now. Collective."""
        parted = self.mesh if self.pm.plan.stages > 1 else None
        with self.pm.whole_extra_states():
            return state_of(self.pm.module, self.optimizer, self.schedule, mesh=parted)

    def resume(self) -> tuple[Position, Tensor]:
        """Position and loss of the newest intact checkpoint, which is loaded; or those of the start. Collective."""
        wanted = self.config.checkpoint.resume
        found = self.checkpoints.ranks.on_first(self.checkpoints.latest)
        if wanted == "never" or found is None:
            if wanted == "must":
                raise CheckpointError(f'{self.checkpoints.folder} holds no checkpoint, but checkpoint.resume = "must"')
            if wanted == "never" and found is not None:
                raise CheckpointError(
                    f'{self.checkpoints.folder} holds step {found}, but checkpoint.resume = "never": give this run a '
                    "folder of its own (--folder …), or resume"
                )
            return Position(), torch.tensor(nan)
        snapshot = self.checkpoints.read()
        for text in snapshot.passed_over:
            self.journal.say(f"warning: {text}")
        restore(snapshot, self.pm.module, self.optimizer, self.schedule)
        torch.set_rng_state(snapshot.tensor("random.cpu"))
        counts = snapshot.values["counts"]
        self.pm.calls, self.pm.updates = counts["calls"], counts["updates"]
        position = Position(**snapshot.values["position"])
        if position.batch and snapshot.values["batches"] != self.batches:
            position = replace(position, epoch=position.epoch + 1, batch=0)
            self.journal.say(f"the batches are others than those of the checkpoint: on with epoch {position.epoch}")
        self.saved = position.step
        self.journal.resumed(position.step)
        self.journal.say(f"resumed from step {position.step}")
        return position, torch.tensor(float(snapshot.values["loss"]))

    def kept(self) -> str:
        """What of the run is safe, in words; a save that is under way is waited for. Collective."""
        with suppress(CheckpointError):  # what is said then is what there is
            self.checkpoints.wait()
        steps = self.checkpoints.steps()
        return f"Step {steps[-1]} is saved in {self.checkpoints.folder}" if steps else "Nothing was saved yet"

    # -- reports ------------------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Say what is about to happen."""
        shares = {id(p): share for p, share in shares_among(self.pm.plain.parameters())}
        whole = (shares[id(p)].shape if id(p) in shares else p.shape for p in self.pm.plain.parameters())
        weights = sum(map(prod, whole))
        held = f", {len(self.held_out.dataset)} held out" if self.held_out is not None else ""
        self.journal.say(
            f"{self.config.model.factory}, {weights:,} weights; {len(self.loader.dataset)} samples{held}; {self.total} "
            f"updates; {', '.join(str(self.config.plan).splitlines())}; in {self.config.folder}"
        )

    def report(self, position: Position, norm: float) -> None:
        """Say how training goes, every so many updates and at the end. Collective."""
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
        state = {"state": "stopped" if stopped else "finished", "by": stopped, **asdict(position), "loss": found.loss}
        if self.mesh.rank == 0:
            text = json.dumps({**state, "scores": dict(scores), "bad": [asdict(b) for b in self.loader.bad]}, indent=1)
            (self.config.folder / STATUS).write_text(text + "\n", encoding="utf-8")
        if self.loader.bad:
            self.journal.say(self.loader.summary())
        return found


@contextmanager
def start(config: Config) -> Generator[Run]:
    """The run, ready to train: samples, mesh, model, optimizer, what was saved. Collective."""
    with ExitStack() as stack:
        training, apart = datasets(config)
        channels, *extents = first_shape(training)
        mesh, plan = joined(config, extents)
        config = config.with_plan(plan)
        device = device_of(config)
        with together(mesh, "the start of the run"):
            occupy(config, mesh)
            model = make_model(config.model, config.seed)
            loss = make_loss(config.loss, device, getattr(torch, config.model.dtype))
            if config.model.weights is not None:
                load_weights(config.model.weights, model)
        if config.model.compile:
            model = cast(nn.Module, torch.compile(model))
        image = (channels, *(config.data.crop or extents))
        pm = parallelize(model, plan, loss, mesh=mesh, device=device, seed=config.seed, image=image)
        mesh = pm.world_mesh
        align = pm.inputs.align((config.data.batch, *image))
        batches = stack.enter_context(closing(training_loader(config, training, mesh, device, align)))
        held_out = held_out_loader(config, apart, mesh, device, align) if apart is not None else None
        if held_out is not None:
            stack.enter_context(closing(held_out))
        optimizer = make_optimizer(config.optimizer, pm.parameters())
        per_epoch = -(-batches.steps_per_epoch // config.train.accumulate)
        total = config.train.steps or config.train.epochs * per_epoch
        schedule = make_schedule(config.schedule, optimizer, total)
        journal = stack.enter_context(closing(Journal(config.folder, config.log, total, mesh.rank == 0)))
        checkpoints = Checkpoints(
            config.folder / CHECKPOINTS,
            mesh,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        )
        stack.callback(checkpoints.close)
        meter = stack.enter_context(closing(Meter(mesh, device)))
        watchdog = stack.enter_context(Watchdog(mesh, config.launch.hang or float("inf")))
        yield Run(
            config, mesh, pm, batches, held_out, optimizer, schedule, checkpoints, journal, meter, watchdog, total
        )


def joined(config: Config, image: Sequence[int]) -> tuple[Mesh, Plan]:
    """The mesh of the ranks that run, and the plan; ranks without a plan divide the images among them."""
    backend = None if config.launch.backend == "auto" else config.launch.backend
    if backend is None and config.launch.device == "cpu":
        backend = "gloo"
    plan = config.plan
    if plan.devices == 1 and placement().world > 1:
        mesh = init(image=image, backend=backend)
        return mesh, replace(plan, spatial=mesh.spatial)
    return mesh_of(plan, backend), plan


def device_of(config: Config) -> torch.device:
    """Where this rank computes."""
    if config.launch.device == "cpu" or not torch.cuda.is_available():
        if config.launch.device == "cuda":
            raise ConfigError('launch.device = "cuda", but torch finds no GPU')
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def occupy(config: Config, mesh: Mesh) -> None:
    """Make the run's folder, and write down what the run is."""
    if mesh.rank == 0:
        try:
            config.folder.mkdir(parents=True, exist_ok=True)
            config.save(config.folder / RESOLVED)
        except OSError as error:
            raise ConfigError(f"the run's folder {config.folder} cannot be written: {error.strerror}") from error
