"""Predictions of whole images under any plan, read and written by boxes: the labels that one device would give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

from mural.comm.failure.agree import gather, together
from mural.data import Dataset, Loader, Sample
from mural.engine import Parallel
from mural.plans import Plan
from mural.prediction.prediction_progress import PredictionProgress
from mural.prediction.result_batches import MapBatches, ResultBatches, RowBatches
from mural.prediction.result_files import ImageFiles, Images, ResultFormat, ResultRecord, image_files
from mural.prediction.result_form import ResultGrid, ResultStyle, extents_at
from mural.prediction.result_rows import TABLE, ImageRow, ResultTable
from mural.prediction.run_domains import images_of
from mural.prediction.trained_model import built, gives_rows, loaded
from mural.prediction.trained_run import Device, TrainedRun, trained_run, under
from mural.train.config import Config
from mural.train.configured_samples import Fitting, first_shape, held_out_loader, padded
from mural.train.local_ranks import on_local_ranks
from mural.train.start import joined


@dataclass(frozen=True)
class Predictions:
    """What a prediction wrote."""

    files: tuple[Path, ...]
    """The label maps of all images, in their order; of a classifier, its table."""
    images: int
    skipped: int
    """How many of them were there before."""
    step: int
    pixels: int
    seconds: float

    def words(self) -> str:
        """The end of a prediction for a person."""
        made = self.images - self.skipped
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
    images: Images | None = None,
    out: str | Path = "predictions",
    *,
    domain: str | None = None,
    plan: Plan | str | Path | None = None,
    stream: Sequence[int] | None = None,
    devices: int = 0,
    device: Device = "run",
    multiple: int = 0,
    format: ResultFormat = "auto",
    grid: ResultGrid = "source",
    pyramid: bool | None = None,
    probabilities: bool = False,
    step: int | None = None,
    overwrite: bool = False,
) -> Predictions:
    """Write what a trained run's model says of whole images to a folder; masks are not needed.

    `images` are globs, folders or paths. The model has the weights of the run's best checkpoint, or of the last where
    `checkpoint.best` is not set, and sees images as in training: scaled, and padded to `data.multiple`, unless another
    `multiple` is given. The plan is the run's, or another one; `stream` is the extent of tiles, `devices` the number of
    local ranks to start, `device` where they compute.

    A file holds a class for every position (uint8, or uint16 where there are more), in the format of its image unless
    `format` says another. Where the run reads a coarser level of images, `grid` says whether files have the extents of
    the finest one ("source": the nearest label of each pixel) or of that one ("level"). Files with a side of more than
    4096 have coarser levels; `pyramid` decides instead. A file takes its name when it is complete, and an image whose
    file is there is skipped. A model that classifies images as a whole gives a table, `predictions.csv`.

    `domain` is one of those of a separation network: its results go to a folder of that name, and its images are those
    of the run's configuration unless others are given. All domains are predicted alike.
    """
    trained = trained_run(Path(run), step)
    folder = Path(out) if domain is None else Path(out) / domain
    files = image_files(images_of(trained, images, domain), folder, format, probabilities)
    request = Request(trained, tuple(files), folder, overwrite, ResultStyle(grid, pyramid))
    config = under(trained.config, plan, stream, devices, device, multiple)
    return on_local_ranks(partial(predict_rank, request), config)


def predict_rank(request: Request, _: int, config: Config) -> Predictions:
    """The prediction on this rank. Collective."""
    first = request.files[0].image
    shape = (first_shape(samples(request.files))[0], *extents_at(first, config.data.level))
    mesh, plan = joined(config, shape[1:])
    config, shape = config.with_plan(plan), (shape[0], *padded(shape[1:], config.data.multiple))
    with together(mesh, "the start of the prediction"):
        model = built(request.run, shape)
        table = ResultTable(request.out / TABLE) if gives_rows(model, shape) else None
        rows = None if table is None else [ImageRow(one.image, table) for one in request.files]
        about = request.run.described() | request.style.described(config.data.level)
        record = ResultRecord(request.out, about) if mesh.rank == 0 else None
        mine = [] if record is None else record.waiting(rows or request.files, request.overwrite)
    waiting: list[int] = next(iter(gather(mesh, mine, "images without a prediction").values()))
    pixels, seconds = 0, 0.0
    if waiting:
        pm = loaded(request.run, model, config, mesh, shape)
        begin = time.monotonic()
        files = [request.files[number] for number in waiting]
        if table is not None and rows is not None:
            batches = RowBatches(pm, config, [rows[number] for number in waiting], table, record)
        else:
            batches = MapBatches(pm, config, files, request.style, record)
        pixels = run_images(pm, config, files, batches)
        seconds = time.monotonic() - begin
    made = (table.path,) if table is not None else tuple(one.labels for one in request.files)
    images = len(request.files)
    return Predictions(made, images, images - len(waiting), request.run.step, pixels, seconds)


def samples(files: Sequence[ImageFiles]) -> Dataset:
    """The images as a dataset."""
    return Dataset.of(Sample(str(one.image), str(one.image)) for one in files)


def run_images(pm: Parallel, config: Config, files: Sequence[ImageFiles], batches: ResultBatches) -> int:
    """Predict the images, and write their results; the pixels that they have. Collective."""
    mesh = pm.world_mesh
    dataset = samples(files)
    align = pm.inputs.align((1, *first_shape(dataset)))
    needs = pm.needs(False)
    with ExitStack() as stack:
        fitting = Fitting(mesh, pm.device, align, None, None, needs, needs)
        loader: Loader = stack.enter_context(closing(held_out_loader(config, dataset, fitting)))
        total = sum(prod(extents_at(one.image, config.data.level)) for one in files)
        progress = stack.enter_context(PredictionProgress(total, len(files), mesh.rank == 0))
        pm.progress = progress.tile
        for batch in loader.epoch(0):
            name = ", ".join(Path(one).name for one in batch.names)
            progress.begins(name, sum(map(prod, batch.stored)))
            batches.take(batch)
            progress.ends(name, len(batch.names))
    return total
