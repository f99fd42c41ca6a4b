"""Files of predictions: named after their samples, and written by every rank that holds a piece of one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Self

import torch
from torch import Tensor

from mural.data import Batch, create
from mural.data.open import FORMATS
from mural.data.pixel_grid import PixelGrid
from mural.data.writing.enlarged import EnlargedWriter
from mural.data.writing.write import Writer
from mural.geometry import Box, overlap, slices, volume, whole
from mural.ranks import AXES, Mesh
from mural.shard import ShardedTensor

PREDICTIONS = "predictions"
SUFFIX = {"zarr": ".ome.zarr", "tiff": ".tif", "nifti": ".nii"}

# -- names -------------------------------------------------------------------------------------------------------------


SUFFIXES = (".gz", *(suffix for form in FORMATS for suffix in form.suffixes), ".ome")


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


# -- files -------------------------------------------------------------------------------------------------------------


def cropped(shape: Sequence[int], seen: Sequence[int], stored: Sequence[int]) -> tuple[int, ...]:
    """The shape (C, …) of an image's result without padding; one that has not the extents that the model saw stays.

    >>> cropped((2, 64, 48), (64, 48), (50, 48)), cropped((2, 32, 24), (64, 48), (50, 48))
    ((2, 50, 48), (2, 32, 24))
    """
    return (shape[0], *stored) if tuple(shape[1:]) == tuple(seen) else tuple(shape)


def write(files: Sequence[Path], predicted: ShardedTensor, batch: Batch) -> None:
    """Write each image's prediction (C, …) to its file; every rank writes the piece that it holds. Collective."""
    mesh, writes = predicted.mesh, writes_piece(predicted)
    for index, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        shape = cropped(predicted.shape[1:], batch.shape[2:], batch.stored[index])
        with FileForm().writer(file, shape, predicted.dtype, mesh) as writer:
            first, *box = predicted.box
            if writes and first.start <= index < first.stop and all(i.size for i in box):
                write_within(writer, tuple(box), predicted.local[index - first.start])


def writes_piece(tensor: ShardedTensor) -> bool:
    """Whether this rank writes its piece: where ranks hold the same one, the first of them does."""
    cut = tensor.placement.axes_of(range(tensor.placement.ndim))
    return all(tensor.mesh.coordinates[axis] == 0 for axis in AXES if axis not in cut)


def write_within(writer: Writer | EnlargedWriter, box: Box, piece: Tensor) -> None:
    """Write what of a piece lies within the file, which ends before the padding does."""
    inside = overlap(box, whole(writer.shape))
    if volume(inside):
        writer.write(inside, piece[slices(inside, box)])


@dataclass(frozen=True)
class FileForm:
    """How an image's prediction is written: where its pixels lie, and how many levels it has.

    `fine` are extents that it is enlarged to, if it is; `levels` of None go on until one is a single tile.
    """

    grid: PixelGrid = field(default_factory=PixelGrid)
    fine: tuple[int, ...] | None = None
    levels: int | None = 1

    def writer(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh) -> Writer | EnlargedWriter:
        """Begin the file of a prediction (C, …). Collective."""
        labels = not dtype.is_floating_point
        options: dict[str, Any] = {"overwrite": True, "grid": self.grid, "levels": self.levels, "labels": labels}
        if self.fine is None or self.fine == shape[1:]:
            return create(path, shape, dtype, mesh=mesh, **options)
        return EnlargedWriter(path, shape, self.fine, dtype, mesh=mesh, **options)


class PredictionWriters:
    """The files of a batch's predictions under way, to which every rank writes its tiles. Entering and leaving a `with`
    block, and `open` in it, are collective; without `open`, there are no files.
    """

    def __init__(self, names: Sequence[Path], mesh: Mesh, batch: Batch, forms: Sequence[FileForm] = ()):
        self.names, self.mesh, self.batch = names, mesh, batch
        self.forms = forms or [FileForm()] * len(names)
        self.writers: list[Writer | EnlargedWriter] = []

    def __enter__(self) -> Self:
        self.opened = ExitStack().__enter__()
        return self

    def open(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Begin one file for each image; `shape` is that of one prediction, (C, …)."""
        for name, stored, form in zip(self.names, self.batch.stored, self.forms, strict=True):
            name.parent.mkdir(parents=True, exist_ok=True)
            made = form.writer(name, cropped(shape, self.batch.shape[2:], stored), dtype, self.mesh)
            self.writers.append(self.opened.enter_context(made))

    def write(self, box: Box, predicted: Tensor) -> None:
        """Write a box of the predictions of all images, (N, C, …)."""
        (start, stop), *place = box
        for index in range(start, stop) if self.writers else ():
            write_within(self.writers[index], tuple(place), predicted[index - start])

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)
