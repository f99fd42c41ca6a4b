"""Synthetic samples on disk, for examples and benchmarks; any size, since a band of tiles is in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mural.data.sets.dataset import Dataset
from mural.data.sets.synthetic import Kind, synthetic
from mural.data.source import Source
from mural.data.writing.write import create


def write_synthetic(
    folder: str | Path,
    count: int = 4,
    size: Sequence[int] | int = 2048,
    seed: int = 0,
    kind: Kind = "tissue",
    suffix: str = ".tif",
) -> Dataset:
    """Write that many samples to `folder/images` and `folder/masks`, and return the dataset of these files.

    `suffix` chooses the format (`.tif`, `.zarr`, …).
    """
    images, masks = Path(folder) / "images", Path(folder) / "masks"
    for place in (images, masks):
        place.mkdir(parents=True, exist_ok=True)
    names = [f"{kind}-{number:04d}{suffix}" for number in range(count)]
    for number, name in enumerate(names):
        sample = synthetic(size, seed + number, kind)
        copy(sample.image, images / name)
        copy(sample.target, masks / name)
    return Dataset([images / name for name in names], [masks / name for name in names])


def copy(source: Source, path: Path) -> None:
    """Write a source to a file, a band of tiles at a time."""
    rows = source.chunks[1]
    with create(path, source.shape, source.dtype) as writer:
        for start in range(0, source.shape[1], rows):
            box = [(0, n) for n in source.shape]
            box[1] = (start, min(start + rows, source.shape[1]))
            writer.write(box, source.read(box))
