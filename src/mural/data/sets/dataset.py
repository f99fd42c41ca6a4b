"""Datasets: which images there are, each with its mask or label; files are opened when they are read."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from mural.data.image_sample import Sample, is_path
from mural.data.loading.preflight import DatasetFacts, check
from mural.data.loading.seeded_draws import permutation
from mural.data.sets.pairing import expand, is_glob, listed, pair
from mural.errors import DataError
from mural.ranks import Mesh

Files = str | Path | Sequence[Any]
"""A glob, a folder, a path; or a list of paths, sources, arrays or tensors."""


class Dataset:
    """Images with masks, with labels, or alone.

    Globs, and lists of globs, are paired by the stems of their files, two lists of files by position:

        Dataset("scans/*.tif", "masks/*.png")
        Dataset(["monday/*.tif", "friday/*.tif"], "masks/*.png")
        Dataset(["a.tif", "b.tif"], labels=[0, 1])
        Dataset([tensor, array, source], [mask, mask, mask])
        Dataset.from_csv("train.csv")       # columns image,mask or image,label; paths relative to the file

    >>> import torch
    >>> data = Dataset([torch.zeros(3, 8, 8)] * 10, labels=range(10))
    >>> training, validation = data.split(0.2, seed=0)
    >>> len(training), len(validation), training[0].target
    (8, 2, 0)
    """

    def __init__(self, images: Files, masks: Files | None = None, *, labels: Sequence[Any] | None = None):
        if masks is not None and labels is not None:
            raise DataError("a dataset has masks or labels, not both: leave one of them out")
        if by_names(images, masks):
            pairs: list[tuple[Any, Any]] = list(pair(images, masks))  # type: ignore[arg-type]
        else:
            first = items(images, "images")
            second = items(masks, "masks") if masks is not None else list(labels) if labels is not None else None
            if second is not None and len(first) != len(second):
                what = "masks" if labels is None else "labels"
                raise DataError(f"{len(first)} images were given with {len(second)} {what}: give one for each image")
            pairs = list(zip(first, second or [None] * len(first), strict=True))
        self.samples = alike(Sample(name_of(image, i), image, target) for i, (image, target) in enumerate(pairs))

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Dataset:
        """The dataset of these samples."""
        found = cls.__new__(cls)
        found.samples = alike(samples)
        return found

    @classmethod
    def from_csv(cls, path: str | Path, *, classes: Sequence[str] | None = None) -> Dataset:
        """The dataset of a CSV file with a header: `image`, and `mask` or `label` or neither.

        Paths are relative to the file's folder. A label is a class index or a value; with `classes`, one of these
        names, which stands for its place among them, or that place.
        """
        return cls.of(rows_of(Path(path).expanduser(), classes))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __repr__(self) -> str:
        return f"Dataset({len(self)} samples: {listed([s.name for s in self.samples][:3])}{', …' * (len(self) > 3)})"

    def name(self, index: int) -> str:
        """The name of a sample."""
        return self.samples[index].name

    def split(self, fraction: float, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Two datasets, for training and for validation: the second has that fraction of the samples, drawn by seed."""
        if not 0 < fraction < 1:
            raise DataError(f"split: fraction={fraction} must be between 0 and 1, as in 0.2")
        if len(self) < 2:
            raise DataError(
                "split: a dataset of one sample cannot be divided: add samples, or validate on the same one"
            )
        count = min(len(self) - 1, max(1, round(fraction * len(self))))
        order = permutation(len(self), int(seed), "split")
        held, kept = sorted(order[:count]), sorted(order[count:])
        return Dataset.of(self.samples[i] for i in kept), Dataset.of(self.samples[i] for i in held)

    def check(self, mesh: Mesh | None = None) -> DatasetFacts:
        """Open every file before a run: masks must have their image's size, all images the same channels and type.

        The files are divided over the ranks of the mesh, and what is wrong is raised on every rank. Collective.
        """
        return check(self, mesh)


def alike(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """The samples, their labels all values where one of them is not a class index."""
    found = tuple(samples)
    if not found:
        raise DataError("a dataset needs at least one sample, but the list is empty")
    if any(isinstance(sample.target, float) for sample in found):
        return tuple(replace(s, target=float(s.target)) if isinstance(s.target, int) else s for s in found)
    return found


def by_names(images: Files, masks: Files | None) -> bool:
    """Whether images and masks are patterns, so that names say which belong together; in lists, one of them is."""
    if masks is None or (is_path(images) and is_path(masks)):
        return masks is not None
    every = [each for files in (images, masks) for each in ([files] if is_path(files) else listing(files))]
    return all(map(is_path, every)) and any(is_glob(each) for files in (images, masks) for each in listing(files))


def listing(files: Files) -> Sequence[Any]:
    """The members of a list; a pattern alone has none."""
    return () if isinstance(files, (str, Path)) else files


def items(files: Files, what: str) -> list[Any]:
    """The members of a list, with the files of each pattern in it; or the files of a pattern."""
    if isinstance(files, (str, Path)):
        return list(expand(files, what))
    return [file for each in files for file in (expand(each, what) if is_path(each) and is_glob(each) else [each])]


def name_of(image: Any, index: int) -> str:
    """What a sample is called in messages: its path or source's name, or its number."""
    if is_path(image):
        return str(image)
    name = getattr(image, "name", None)
    return name if isinstance(name, str) and name else f"image {index}"


def rows_of(path: Path, classes: Sequence[str] | None) -> Iterator[Sample]:
    """The samples of a CSV file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not a text in UTF-8, at byte {error.start}"
        raise DataError(f"{path}: the CSV file cannot be read ({why}): check what it is", str(path)) from error
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    columns = [column.strip() for column in rows.fieldnames or []]
    rows.fieldnames = columns
    check_columns(path, columns)
    if not any(line.strip() for line in text.splitlines()[1:]):
        raise DataError(
            f"{path}: there is nothing below its columns {columns}: write at least one line with an image", str(path)
        )
    for row in rows:
        image, line = cell(row, "image", path, rows.line_num), f"{path}, line {rows.line_num}"
        target: Any = None
        if "mask" in columns:
            target = path.parent / cell(row, "mask", path, rows.line_num)
        elif "label" in columns:
            target = label(cell(row, "label", path, rows.line_num), line, classes)
        yield Sample(str(path.parent / image), path.parent / image, target)


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """Raise unless the columns say what each row is."""
    wanted = {"image", "mask", "label"}
    near = {c: match[0] for c in columns if c not in wanted and (match := get_close_matches(c.lower(), wanted, 1, 0.6))}
    hint = "".join(f"; {column!r} looks like {meant!r}: rename it" for column, meant in near.items())
    rule = "the first line names the columns: image, and mask or label or neither"
    if "image" not in columns:
        raise DataError(f"{path}: no column 'image' among {columns}{hint}; {rule}", str(path))
    if "mask" in columns and "label" in columns:
        raise DataError(f"{path}: has both a column 'mask' and a column 'label': keep one; {rule}", str(path))
    if {"mask", "label"}.isdisjoint(columns) and near:
        raise DataError(f"{path}: no column 'mask' or 'label' among {columns}{hint}; {rule}", str(path))


def cell(row: dict[str, str | None], column: str, path: Path, line: int) -> str:
    """The text of a row's column, or an error where it is empty."""
    text = (row.get(column) or "").strip()
    if not text:
        raise DataError(f"{path}, line {line}: column {column!r} is empty: fill it in or remove the line", str(path))
    return text


def label(text: str, where: str, classes: Sequence[str] | None) -> int | float:
    """A label from its text: a class index, a value, or the place of a name among the classes."""
    if classes is not None and not (text.isdecimal() and text not in classes and int(text) < len(classes)):
        if text not in classes:
            near = get_close_matches(text, classes, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataError(f"{where}: the label {text!r} is not one of the classes {list(classes)}{hint}")
        return list(classes).index(text)
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if isfinite(number):
            return number
    raise DataError(
        f"{where}: the label {text!r} is not a number: write a class index or a value, "
        f"or name the classes: data.classes = ['benign', 'tumour'], or Dataset.from_csv(path, classes=…)"
    )
