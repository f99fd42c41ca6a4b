"""Validation: whole images through the model under the plan, their scores, and their predictions piece by piece."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mural.comm import AXES
from mural.data import create
from mural.shard import ShardedTensor
from mural.train.run import Run
from mural.train.scores import Scores

PREDICTIONS = "predictions"
SUFFIX = {"zarr": ".ome.zarr", "tiff": ".tif"}


def validate(run: Run, step: int) -> dict[str, Any]:
    """The scores of all held-out images under this step's weights; predictions are written if asked for. Collective."""
    if run.held_out is None:
        raise ValueError("there is nothing to validate on")
    pm, scores = run.pm, Scores()
    pm.synchronise(run.optimizer)
    pm.eval()
    for batch in run.held_out.epoch(0):
        run.watchdog.progress(f"validation after step {step}")
        output, target, loss = pm.evaluate(batch.image, batch.target)
        predicted = scores.add(output, target, float(loss), int(batch.image.shape[0]))
        if run.config.validation.write and isinstance(predicted, ShardedTensor):
            folder = run.config.folder / PREDICTIONS / f"step-{step:06d}"
            write(folder, SUFFIX[run.config.validation.write], batch.names, predicted)
    pm.train()
    found = pm.from_last(scores.result())
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    run.journal.note("validation", step, found, numbers)
    run.journal.say(f"validation after step {step}: " + "  ".join(f"{n} {v:.4f}" for n, v in numbers.items()))
    return found


def write(folder: Path, suffix: str, names: Sequence[str], predicted: ShardedTensor) -> None:
    """Write each image's prediction to a file; every rank writes the piece that it holds. Collective."""
    x: Any = predicted
    if not x.is_floating_point():  # a class for every position, and no channels
        x = x.unsqueeze(1).to(torch.uint8 if int(x.max()) < 256 else torch.int32)
    folder.mkdir(parents=True, exist_ok=True)
    mesh, layout = x.mesh, x.placement
    cut = layout.axes_of(range(layout.ndim))
    # Where ranks hold the same piece, the first of them writes it.
    writes = all(mesh.coordinates[axis] == 0 for axis in AXES if axis not in cut)
    for index, name in enumerate(names):
        with create(folder / (file_stem(name) + suffix), x.shape[1:], x.dtype, mesh=mesh, overwrite=True) as writer:
            first, *box = x.box
            if writes and first.start <= index < first.stop and all(i.size for i in box):
                writer.write(box, x.local[index - first.start])


def file_stem(name: str) -> str:
    """A name for a file, from a sample's name.

    >>> file_stem("slides/a 1.ome.tif"), file_stem("scan.nii.gz")
    ('a_1', 'scan')
    """
    stem = Path(name).name
    for suffix in (".gz", ".tif", ".tiff", ".ome", ".zarr", ".nii", ".npy", ".npz", ".png", ".jpg", ".jpeg", ".svs"):
        stem = stem.removesuffix(suffix)
    return re.sub(r"[^\w.-]+", "_", stem) or "image"
