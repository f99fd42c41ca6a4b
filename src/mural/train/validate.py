"""Validation: whole images through the model under the plan, their scores, and their predictions piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mural.data import create
from mural.data.samples import name_at
from mural.ranks import AXES
from mural.shard import ShardedTensor
from mural.train.prediction_names import file_stems
from mural.train.scores import Scores
from mural.train.training_run import Run

PREDICTIONS = "predictions"
SUFFIX = {"zarr": ".ome.zarr", "tiff": ".tif"}


def validate(run: Run, step: int) -> dict[str, Any]:
    """The scores of all held-out images under this step's weights; predictions are written if asked for. Collective."""
    if run.held_out is None:
        raise ValueError("there is nothing to validate on")
    pm, scores, samples = run.pm, Scores(), run.held_out.dataset
    stems = file_stems([name_at(samples, index) or f"sample {index}" for index in range(len(samples))])
    pm.synchronise(run.optimizer)
    pm.eval()
    for batch in run.held_out.epoch(0):
        run.watchdog.progress(f"validation after step {step}")
        with run.naming(batch, f"the validation after step {step}"):
            output, target, loss = pm.evaluate(batch.image, batch.target)
        predicted = scores.add(output, target, float(loss), int(batch.image.shape[0]))
        if run.config.validation.write and isinstance(predicted, ShardedTensor):
            folder = run.config.folder / PREDICTIONS / f"step-{step:06d}"
            suffix = SUFFIX[run.config.validation.write]
            write(folder, [stems[index] + suffix for index in batch.indices], predicted)
    pm.train()
    found = pm.from_last(scores.result())
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    run.journal.note("validation", step, found, numbers)
    run.journal.say(f"validation after step {step}: " + "  ".join(f"{n} {v:.4f}" for n, v in numbers.items()))
    return found


def write(folder: Path, files: Sequence[str], predicted: ShardedTensor) -> None:
    """Write each image's prediction to its file; every rank writes the piece that it holds. Collective."""
    x: Any = predicted
    if not x.is_floating_point():  # a class for every position, and no channels
        x = x.unsqueeze(1).to(torch.uint8 if int(x.max()) < 256 else torch.int32)
    folder.mkdir(parents=True, exist_ok=True)
    mesh, layout = x.mesh, x.placement
    cut = layout.axes_of(range(layout.ndim))
    # Where ranks hold the same piece, the first of them writes it.
    writes = all(mesh.coordinates[axis] == 0 for axis in AXES if axis not in cut)
    for index, file in enumerate(files):
        with create(folder / file, x.shape[1:], x.dtype, mesh=mesh, overwrite=True) as writer:
            first, *box = x.box
            if writes and first.start <= index < first.stop and all(i.size for i in box):
                writer.write(box, x.local[index - first.start])
