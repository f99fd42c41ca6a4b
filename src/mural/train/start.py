"""The start of a run: everything that the loop uses, built in one order from the configuration, and closed together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from mural.check.prover import StepProver, is_plain
from mural.checkpoint import Checkpoints
from mural.checkpoint.folder import steps_in
from mural.comm.failure.agree import together
from mural.comm.failure.shared_fate import shared_fate
from mural.comm.watchdog import Watchdog
from mural.data import Loader
from mural.data.loading.label_range import LabelRange
from mural.domain import SeparationNetwork
from mural.engine import Parallel
from mural.engine.applied_plan import apply_plan, mesh_of
from mural.engine.loss_terms import LossTerms
from mural.engine.stream_program import check_stream
from mural.errors import CheckpointError, ConfigError, cannot_write
from mural.plans import Plan
from mural.ranks import Mesh, init
from mural.ranks.join import placement
from mural.train.best import watched
from mural.train.class_names import check_names
from mural.train.config import Config
from mural.train.configured_loss import (
    check_loss,
    check_targets_of,
    has_known_results,
    label_range,
    make_loss,
    padding_of,
)
from mural.train.configured_samples import (
    SOURCE,
    Fitting,
    Split,
    check_targets,
    datasets,
    first_shape,
    held_out_batches,
    image_shape,
    training_batches,
    with_kind_of_labels,
)
from mural.train.domain_batches import DomainLoader, HeldOutDomains
from mural.train.factory import load_weights, make_model, make_optimizer, make_schedule, result_shape
from mural.train.failing_code import naming
from mural.train.journal import Journal
from mural.train.meters import Meter
from mural.train.result_forms import TargetForm, check_best, check_pairing, names_wanted, score_names
from mural.train.result_meaning import meaning_of
from mural.train.scores import channels_of
from mural.train.start_record import RESOLVED
from mural.train.status import Status
from mural.train.training_run import Run

CHECKPOINTS, PROOFS = "checkpoints", "proofs"


@contextmanager
def start(config: Config, prove: bool = False) -> Generator[Run]:
    """The run, ready to begin: samples, mesh, model, optimizer. Nothing in its folder was changed. Collective.

    With `prove`, its plan can be proved before the first step.
    """
    with ExitStack() as stack:
        splits = datasets(config)
        shapes = [image_shape(config, split) for split in splits.values()]
        for samples in filter(None, (splits[SOURCE].training, splits[SOURCE].held_out)):
            check_targets(config, samples)
        if config.plan.stream is not None:
            check_stream(config.plan.stream, (config.data.batch, *shapes[0]))
        config = with_kind_of_labels(config, splits[SOURCE].training)
        mesh, plan = joined(config, first_shape(splits[SOURCE].training)[1:])
        with shared_fate(mesh.transport):  # no rank waits for one that raised, wherever that was
            run = ready(stack, config.with_plan(plan), mesh, splits, shapes, prove)
        yield run


@dataclass(frozen=True)
class Subject:
    """What is trained, and what is known of it before anything ran."""

    model: nn.Module
    loss: Callable[..., Any]
    splits: Mapping[str, Split]
    labels: LabelRange | None
    padding: float | None
    """What masks are padded with, which the loss does not count; None where it would."""

    @classmethod
    def of(cls, config: Config, device: torch.device, splits: Mapping[str, Split], image: Sequence[int]) -> Subject:
        """That of a configuration, for samples and the source's images (C, H, W); raises for what cannot be trained."""
        dtype = getattr(torch, config.model.dtype)
        model = make_model(config.model, config.seed)
        task = make_loss(config.loss, device, dtype, padded=config.data.multiple > 1)
        check_targets_of(config, task)
        if config.model.weights is not None:
            load_weights(config.model.weights, model)
        check_trainable(config, model, task)
        network = separation_network(config, model, splits)
        names = network.domains if network is not None else list(splits)
        loss, predictor = (task, model) if network is None else (network.loss(task), network.predictor())
        result = result_shape(predictor, image) if has_known_results(task) else None
        target, labels = TargetForm.of(config, splits[SOURCE].training, image[1:]), label_range(task, result)
        check_loss(config.loss, task, labels, dtype)
        check_pairing(config.loss.name, result, target)
        kind = meaning_of(config, channels_of((1, *result))).kind if result is not None else "unknown"
        check_names(config.data.classes, names_wanted(kind, result or ()))
        check_best(config, score_names(kind, result, target, config.data.classes), names[1:])
        if config.model.compile:
            model = cast(nn.Module, torch.compile(model))
        padding = padding_of(config, task, labels)
        return cls(model, loss, dict(zip(names, splits.values(), strict=True)), labels, padding)


def ready(
    stack: ExitStack, config: Config, mesh: Mesh, splits: Mapping[str, Split], shapes: Sequence[tuple[int, ...]],
    prove: bool,
) -> Run:  # fmt: skip
    """Everything that the loop uses, on the ranks of a mesh; the stack closes it. Collective."""
    with together(mesh, "the start of the run"):
        device = device_of(config)
        subject = Subject.of(config, device, splits, shapes[0])
    with naming("the division of the model by its plan", f"images of shape {shapes[0]}", subject.model):
        image = shapes[0] if len(shapes) == 1 else shapes
        pm = apply_plan(
            subject.model, config.plan, subject.loss, mesh=mesh, device=device, seed=config.seed, image=image,
            prover=prover(config, subject.loss) if prove else None,
        )  # fmt: skip
    mesh = pm.world_mesh
    batches, held_out = loaders(stack, config, subject, pm, device, shapes[0])
    optimizer = make_optimizer(config.optimizer, pm.parameters())
    per_epoch = -(-batches.steps_per_epoch // config.train.accumulate)
    total = config.train.steps or config.train.epochs * per_epoch
    schedule = make_schedule(config.schedule, optimizer, total)
    with together(mesh, "the start of the run"):
        make_folder(config, mesh)
    journal = stack.enter_context(closing(Journal(config.folder, config.log, total, mesh.rank == 0)))
    folder, kept = config.folder / CHECKPOINTS, config.checkpoint
    checkpoints = Checkpoints(folder, mesh, keep=kept.keep, asynchronous=kept.asynchronous)
    stack.callback(checkpoints.close)
    meter = stack.enter_context(closing(Meter(mesh, device)))
    status = Status(config.folder, mesh.rank)
    watchdog = stack.enter_context(Watchdog(mesh, config.launch.hang or float("inf"), status.hung))
    run = Run(
        config, mesh, pm, batches, held_out, optimizer, schedule, checkpoints, journal, meter, watchdog, status, total
    )
    pm.progress = run.tile_done
    return run


def prover(config: Config, loss: Callable[..., Any]) -> StepProver | None:
    """What proves the plan of a run, and remembers it in its folder; None for one that one device runs as it is."""
    if is_plain(config.plan):
        return None
    return StepProver(config.plan, loss, config.folder / PROOFS, f"mural check {config.folder / RESOLVED}")


def loaders(
    stack: ExitStack, config: Config, subject: Subject, pm: Parallel, device: torch.device, image: Sequence[int]
) -> tuple[Loader | DomainLoader, Loader | HeldOutDomains | None]:
    """The batches to train on, and the held-out images, if there are any; the stack closes them. Collective."""
    align = pm.inputs.align((config.data.batch, *image))
    fittings = [
        Fitting(pm.world_mesh, device, align, subject.labels, subject.padding, pm.needs(True, n), pm.needs(False, n))
        for n in range(len(subject.splits))
    ]
    batches = stack.enter_context(closing(training_batches(config, subject.splits, fittings)))
    held_out = held_out_batches(config, subject.splits, fittings)
    if held_out is not None:
        stack.enter_context(closing(held_out))
    elif watched(config):
        raise ConfigError(
            "checkpoint.best and train.stop_after look at validations, but nothing is held out: set "
            "validation.images or validation.fraction"
        )
    return batches, held_out


def check_trainable(config: Config, model: nn.Module, loss: Callable[..., Any]) -> None:
    """Raise if nothing would be trained."""
    if not any(p.requires_grad for p in (*model.parameters(), *LossTerms.of(loss, model).parameters())):
        raise ConfigError(
            f'model.factory = "{config.model.factory}": the model has no parameters that require gradients, so there '
            f"is nothing to train: call requires_grad_() on some"
        )


def separation_network(config: Config, model: nn.Module, splits: Mapping[str, Split]) -> SeparationNetwork | None:
    """The model, if it is a separation network, whose targets have to be those of the configuration; else None."""
    targets = [name for name in splits if name != SOURCE]
    wanted = list(model.domains[1:]) if isinstance(model, SeparationNetwork) else []
    if targets != wanted:
        raise ConfigError(
            f"targets.images has {targets}, but the model has the target domains {wanted}: name the same ones in the "
            f"same order, in targets.images and in model.arguments"
        )
    if isinstance(model, SeparationNetwork) and config.data.multiple > 1:
        raise ConfigError(
            f"data.multiple = {config.data.multiple}: a separation network's losses would count the padding: set "
            f"data.crop instead, or give images whose extents are multiples"
        )
    return model if isinstance(model, SeparationNetwork) else None


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
            raise ConfigError(
                'launch.device = "cuda", but torch finds no GPU: set "cpu" or "auto", or see what `mural doctor` says'
            )
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def make_folder(config: Config, mesh: Mesh) -> None:
    """Make the run's folder, unless the run cannot begin in it."""
    if mesh.rank != 0:
        return
    if config.checkpoint.resume == "must" and not steps_in(config.folder / CHECKPOINTS):
        raise CheckpointError(
            f'{config.folder / CHECKPOINTS} holds no checkpoint, but checkpoint.resume = "must": set "auto"'
        )
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(f"the run's folder {config.folder}", error) from error
