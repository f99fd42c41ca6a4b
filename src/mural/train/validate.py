"""Validation: the scores of held-out images, and their predictions in files named after the samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from mural.data import create
from mural.data.image_sample import name_at
from mural.ranks import AXES
from mural.shard import ShardedTensor
from mural.shard.relayout import merged
from mural.train.training_run import Run

# -- names of prediction files -----------------------------------------------------------------------------------------


SUFFIXES = (".gz", ".tif", ".tiff", ".ome", ".zarr", ".nii", ".npy", ".npz", ".png", ".jpg", ".jpeg", ".svs")


def file_stem(name: str) -> str:
    """A name for a file, from a sample's name.

    >>> file_stem("slides/a 1.ome.tif"), file_stem("scan.nii.gz")
    ('a_1', 'scan')
    """
    stem = Path(name).name
    for suffix in SUFFIXES:
        stem = stem.removesuffix(suffix)
    return tidy(stem) or "image"


def tidy(text: str) -> str:
    """A text with only the characters that a file's name may have."""
    return re.sub(r"[^\w.-]+", "_", text)


def file_stems(names: Sequence[str]) -> list[str]:
    """A name for each sample's file: its stem; of samples with one stem, with what else of the paths tells them apart.

    Names that differ in the case of letters alone count as one, since some file systems take them for one.

    >>> file_stems(["s/a/x.tif", "s/b/x.tif", "s/b/y.tif"])
    ['a_x', 'b_x', 'y']
    >>> file_stems(["x.tif", "x.png", "a/x.tif", "a_x.tif", "y", "y"])
    ['x_tif', 'x_png', 'a_x_tif', 'a_x', 'y', 'y_2']
    """
    found = [file_stem(name) for name in names]
    groups: dict[str, list[int]] = {}
    for place, stem in enumerate(found):
        groups.setdefault(stem.casefold(), []).append(place)
    taken = {key for key, places in groups.items() if len(places) == 1}
    for places in (places for places in groups.values() if len(places) > 1):
        told = apart([names[i] for i in places], [found[i] for i in places], taken)
        taken.update(text.casefold() for text in told)
        for place, text in zip(places, told, strict=True):
            found[place] = text
    return found


def apart(names: Sequence[str], stems: Sequence[str], taken: set[str]) -> list[str]:
    """Names for samples of one stem that differ from each other and from those taken."""
    texts = list(stems)
    for longer in (with_folders, with_suffix):
        texts = longer(names, texts)
        keys = [text.casefold() for text in texts]
        if len(set(keys)) == len(keys) and taken.isdisjoint(keys):
            return texts
    return numbered(texts, taken)


def with_folders(names: Sequence[str], stems: Sequence[str]) -> list[str]:
    """Stems with the folders of their paths that not all have in common."""
    folders = [PurePath(name).parts[:-1] for name in names]
    most = min(map(len, folders))
    start = next((i for i in range(most) if len({parts[i] for parts in folders}) > 1), most)
    rest = [parts[start:] for parts in folders]
    most = min(map(len, rest))
    stop = next((i for i in range(most) if len({parts[-1 - i] for parts in rest}) > 1), most)
    kept = [parts[: len(parts) - stop] for parts in rest]
    return ["_".join([*map(tidy, parts), stem]) for parts, stem in zip(kept, stems, strict=True)]


def with_suffix(names: Sequence[str], stems: Sequence[str]) -> list[str]:
    """Stems with the suffixes of their files, where these differ."""
    ends = ["_".join(re.findall(r"\w+", "".join(PurePath(name).suffixes))) for name in names]
    if len(set(ends)) == 1:
        return list(stems)
    return [f"{stem}_{end}" if end else stem for stem, end in zip(stems, ends, strict=True)]


def numbered(texts: Sequence[str], taken: set[str]) -> list[str]:
    """The texts, with a number where one came before or is taken."""
    found: list[str] = []
    used = set(taken)
    for text in texts:
        given, number = text, 1
        while given.casefold() in used:
            number += 1
            given = f"{text}_{number}"
        used.add(given.casefold())
        found.append(given)
    return found


# -- scores ------------------------------------------------------------------------------------------------------------


class Scores:
    """Adds up batches. Class scores are kept where the output has one channel per class of an integer target."""

    def __init__(self) -> None:
        self.loss = self.images = 0.0
        self.confusion: Tensor | None = None
        self.error = 0.0

    def add(self, output: Any, target: Any, loss: float, images: int) -> Any:
        """Count a batch; returns the predicted classes where there are any, else the output. Collective."""
        self.loss += loss * images
        self.images += images
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return output
        predicted = classes_of(output, target)
        if predicted is None:
            if output.shape == target.shape:
                self.error += float((output.detach() - target).abs().mean()) * images
            return output
        if predicted.shape == target.shape:
            classes = max(2, int(output.shape[1]))
            counts = confusion(predicted, target, classes)
            self.confusion = counts if self.confusion is None else self.confusion + counts
        return predicted

    def result(self) -> dict[str, float | list[float]]:
        """The scores of all batches."""
        images = max(self.images, 1.0)
        found: dict[str, float | list[float]] = {"loss": self.loss / images}
        if self.confusion is None:
            return found | ({"absolute_error": self.error / images} if self.error else {})
        both = self.confusion.diagonal()
        either = self.confusion.sum(0) + self.confusion.sum(1) - both
        seen = either > 0
        overlap = torch.where(seen, both / either.clamp(min=1), torch.zeros_like(both))
        found["accuracy"] = float(both.sum() / self.confusion.sum().clamp(min=1))
        found["mean_iou"] = float(overlap[seen].mean()) if bool(seen.any()) else 0.0
        found["mean_dice"] = float((2 * overlap / (1 + overlap))[seen].mean()) if bool(seen.any()) else 0.0
        found["iou"] = [round(float(v), 6) for v in overlap]
        return found


def classes_of(output: Tensor, target: Tensor) -> Tensor | None:
    """The predicted class of every position (or image); None where the output does not hold scores of classes."""
    if not target.is_floating_point() and output.ndim == target.ndim + 1 and output.shape[1] > 1:
        return output.argmax(1)
    if output.shape == target.shape and output.shape[1:2] == (1,) and bool(((target == 0) | (target == 1)).all()):
        return (output > 0).to(torch.int64)
    return None


def confusion(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """How often class i was taken for class j, over all ranks; targets out of range (ignored ones) do not count."""
    target = target.to(torch.int64)
    known = (target >= 0) & (target < classes)
    pairs: Any = torch.where(known, target * classes + predicted, torch.full_like(target, classes * classes))
    local = pairs.local if isinstance(pairs, ShardedTensor) else pairs
    counts = torch.bincount(local.reshape(-1), minlength=classes * classes + 1)[: classes * classes].double()
    if isinstance(pairs, ShardedTensor):
        axes = pairs.placement.axes_of(range(pairs.placement.ndim))
        counts = merged(counts, pairs.mesh, axes, "confusion")
    return counts.cpu().view(classes, classes)


# -- validation --------------------------------------------------------------------------------------------------------


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
        run.begins(f"validation after step {step}")
        with run.naming(batch, f"the validation after step {step}"):
            output, target, loss = pm.evaluate(batch.image, batch.target)
        predicted = scores.add(output, target, float(loss), batch.shape[0])
        if run.config.validation.write and isinstance(predicted, ShardedTensor):
            folder = run.config.folder / PREDICTIONS / f"step-{step:06d}"
            suffix = SUFFIX[run.config.validation.write]
            write(folder, [stems[index] + suffix for index in batch.indices], predicted)
    run.journal.advance(step)
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
