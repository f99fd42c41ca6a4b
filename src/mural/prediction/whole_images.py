"""Predictions of whole images under any plan, read and written by boxes: the labels that one device would give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import nn

from mural.checkpoint import open_snapshot, restore
from mural.checkpoint.checkpoints import WAIT
from mural.comm.failure.agree import gather, together
from mural.comm.groups import group_on_host
from mural.data import Dataset, Loader, Sample
from mural.engine import Parallel
from mural.engine.alignment import graph_for, likely_shapes
from mural.errors import DataError
from mural.parallelize import parallelize
from mural.plans import Plan
from mural.prediction.prediction_progress import PredictionProgress
from mural.prediction.result_files import ImageFiles, ResultFormat, ResultRecord, image_files
from mural.prediction.result_form import ResultGrid, ResultStyle, extents_at
from mural.prediction.result_sink import MapSink, deliver
from mural.prediction.trained_run import Device, TrainedRun, trained_run, under
from mural.ranks import Mesh
from mural.train.config import Config
from mural.train.configured_samples import Fitting, first_shape, held_out_loader, padded
from mural.train.factory import make_loss, make_model
from mural.train.local_ranks import on_local_ranks
from mural.train.start import device_of, joined


@dataclass(frozen=True)
class Predictions:
    """What a prediction wrote."""

    files: tuple[Path, ...]
    """The label maps of all images, in their order."""
    skipped: int
    """How many of them were there before."""
    step: int
    pixels: int
    seconds: float

    def words(self) -> str:
        """The end of a prediction for a person."""
        made = len(self.files) - self.skipped
        before = f", {self.skipped} were there before" if self.skipped else ""
        pace = f"; {self.seconds / max(self.pixels, 1) * 1e9:.0f} s per gigapixel" if made else ""
        return f"{made} image{'s' * (made != 1)} predicted by step {self.step}{before}{pace}; in {self.files[0].parent}"


@dataclass(frozen=True)
class Request:
    """Which images are predicted, by which checkpoint, into which files."""

    run: TrainedRun
    files: tuple[ImageFiles, ...]
    out: Path
    overwrite: bool
    style: ResultStyle = field(default_factory=ResultStyle)


def predict(
    run: str | Path,
    images: str | Path | Sequence[str | Path],
    out: str | Path = "predictions",
    *,
    plan: Plan | str | Path | None = None,
    stream: Sequence[int] | None = None,
    devices: int = 0,
    device: Device = "run",
    format: ResultFormat = "auto",
    grid: ResultGrid = "source",
    pyramid: bool | None = None,
    probabilities: bool = False,
    step: int | None = None,
    overwrite: bool = False,
) -> Predictions:
    """Write what a trained run's model says of whole images to a folder; masks are not needed.

    `images` are globs, folders or paths. The model has the weights of the run's best checkpoint, or of the last where
    `checkpoint.best` is not set, and sees images as in training: scaled, and padded to `data.multiple`. The plan is the
    run's, or another one; `stream` is the extent of tiles, `devices` the number of local ranks to start, `device` where
    they compute.

    A file holds a class for every position (uint8, or uint16 where there are more), in the format of its image unless
    `format` says another. Where the run reads a coarser level of images, `grid` says whether files have the extents of
    the finest one ("source": the nearest label of each pixel) or of that one ("level"). Files with a side of more than
    4096 have coarser levels; `pyramid` decides instead. A file takes its name when it is complete, and an image whose
    file is there is skipped.
    """
    trained = trained_run(Path(run), step)
    files = image_files(images, Path(out), format, probabilities)
    request = Request(trained, tuple(files), Path(out), overwrite, ResultStyle(grid, pyramid))
    return on_local_ranks(partial(predict_rank, request), under(trained.config, plan, stream, devices, device))


def predict_rank(request: Request, _: int, config: Config) -> Predictions:
    """The prediction on this rank. Collective."""
    every = samples(request.files)
    shape = first_shape(every)
    mesh, plan = joined(config, shape[1:])
    config = config.with_plan(plan)
    record: ResultRecord | None = None
    with together(mesh, "the start of the prediction"):
        about = request.run.described() | request.style.described(config.data.level)
        record = ResultRecord(request.out, about) if mesh.rank == 0 else None
        mine = [] if record is None else record.waiting(request.files, request.overwrite)
    waiting = next(iter(gather(mesh, mine, "images without a prediction").values()))
    pixels, seconds = 0, 0.0
    if waiting:
        pm = loaded(request.run, config, mesh, (shape[0], *padded(shape[1:], config.data.multiple)))
        begin = time.monotonic()
        pixels = run_images(pm, config, waiting, request.style, record)
        seconds = time.monotonic() - begin
    files = tuple(one.labels for one in request.files)
    skipped = len(request.files) - len(waiting)
    return Predictions(files, skipped, request.run.step, pixels, seconds)


def samples(files: Sequence[ImageFiles]) -> Dataset:
    """The images as a dataset."""
    return Dataset.of(Sample(str(one.image), str(one.image)) for one in files)


def loaded(run: TrainedRun, config: Config, mesh: Mesh, shape: tuple[int, ...]) -> Parallel:
    """The run's model under a plan, with the weights of its checkpoint. Collective."""
    device = device_of(config)
    with together(mesh, "the start of the prediction"):
        model = make_model(config.model, config.seed)
        check_channels(model, shape, run.folder)
        loss = make_loss(config.loss, device, getattr(torch, config.model.dtype))
    pm = parallelize(model, config.plan, loss, mesh=mesh, device=device, seed=config.seed, image=shape)
    group = group_on_host("predictions", WAIT) if mesh.world > 1 else None
    restore(open_snapshot(run.checkpoints, group, run.step), pm.module)
    pm.eval()
    return pm


def check_channels(model: nn.Module, shape: tuple[int, ...], run: Path) -> None:
    """Raise if the model does not take images with so many channels, as far as its first convolution tells."""
    wanted = next((found[1] for found in likely_shapes(model)), shape[0])
    if wanted == shape[0]:
        return
    try:
        graph_for(model, shape)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise DataError(
            f"the images have {shape[0]} channels, but the model of {run} was trained on {wanted}: give images like "
            f"those of the training"
        ) from error


def run_images(
    pm: Parallel, config: Config, files: Sequence[ImageFiles], style: ResultStyle, record: ResultRecord | None
) -> int:
    """Predict the images, and write their files; the pixels that these have. One rank has the record. Collective."""
    mesh = pm.world_mesh
    dataset = samples(files)
    align = pm.inputs.align((1, *first_shape(dataset)))
    needs = pm.needs(False)
    with ExitStack() as stack:
        fitting = Fitting(mesh, pm.device, align, None, None, needs, needs)
        loader: Loader = stack.enter_context(closing(held_out_loader(config, dataset, fitting)))
        forms = {str(one.image): style.form(one.image, config.data.level) for one in files}
        total = sum(prod(extents_at(one.image, config.data.level)) for one in files)
        progress = stack.enter_context(PredictionProgress(total, len(files), mesh.rank == 0))
        pm.progress = progress.tile
        for batch in loader.epoch(0):
            name = ", ".join(Path(one).name for one in batch.names)
            progress.begins(name, sum(map(prod, batch.stored)))
            chosen = [files[index] for index in batch.indices]
            with together(mesh, "the record of predictions"):
                if record is not None:
                    record.begin(chosen)
            with MapSink(chosen, [forms[one] for one in batch.names], batch, config, mesh) as sink:
                deliver(pm, batch, sink)
            progress.ends(name, len(batch.names))
    return total
