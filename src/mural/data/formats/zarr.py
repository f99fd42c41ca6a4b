"""Zarr v2 and v3 and OME-Zarr, with and without shards, read and written through tensorstore."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from mural.data.formats.axes import Axes, guessed, resolved
from mural.data.formats.dtypes import Array
from mural.data.formats.ngff import ZarrNode, arrays_below, axis_names, multiscales, node
from mural.data.formats.stored import OpenedFile, Options
from mural.data.source import Counter
from mural.errors import DataError, reading_hint
from mural.geometry import Box, slices
from mural.geometry.tile_grid import count

DRIVERS = {2: "zarr", 3: "zarr3"}
# tensorstore's annotations do not cover how its objects are made.
ts: Any = tensorstore


@dataclass(frozen=True)
class ZarrArray:
    """An array of a Zarr folder; of a shard, only the chunks inside it that a box touches are decoded."""

    opened: Any
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, opened: Any) -> ZarrArray:
        """The array that tensorstore opened."""
        shape, chunks = (tuple(int(n) for n in e) for e in (opened.shape, opened.chunk_layout.read_chunk.shape))
        return cls(opened, shape, chunks, np.dtype(opened.dtype.numpy_dtype).newbyteorder("="))

    def read_into(self, out: Array, box: Box, counter: Counter) -> None:
        """Fill an array with the pixels of a box."""
        window = self.opened[slices(box)]
        ts.array(out).write(window.translate_to[0]).result()
        tiles = count(box, self.chunks)
        counter.add(tiles=tiles, bytes_=tiles * prod(self.chunks) * self.dtype.itemsize)


def open_array(path: Path, version: int, threads: int) -> ZarrArray:
    """An array that exists."""
    limit = {"limit": max(1, threads)}
    spec = {
        "driver": DRIVERS[version],
        "kvstore": kvstore(path),
        # Pixels are decoded when they are read: what to keep is for the caller to say.
        "context": {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": limit,
            "file_io_concurrency": limit,
        },
    }
    try:
        return ZarrArray.of(ts.open(spec, open=True, read=True).result())
    except ValueError as error:
        damaged = (
            "the metadata are damaged, or name a codec that it lacks: write the array again with zstd, gzip or blosc"
        )
        hint = reading_hint(error, damaged)
        what = f"{path}: tensorstore cannot open this Zarr v{version} array: {short(error)}"
        raise DataError(f"{what}{hint and f'. {hint[0].upper()}{hint[1:]}'}", str(path)) from error


def kvstore(path: Path) -> dict[str, str]:
    """A folder as tensorstore takes it, which refuses paths with `..` in them."""
    return {"driver": "file", "path": f"{os.path.realpath(path)}/"}


def short(error: Exception) -> str:
    """What tensorstore says, without the specification that it repeats."""
    return str(error).split(" [")[0]


def open_zarr(path: Path, options: Options) -> OpenedFile:
    """A Zarr array, or the levels of an OME-Zarr image."""
    found = find(path, options.key)
    if found.is_array:
        array = open_array(found.path, found.version, options.threads)
        return OpenedFile((array,), axes_of(path, found.names, array.shape, options))
    scales = multiscales(found)
    if not 0 <= options.series < len(scales):
        raise DataError(
            f"{path}: image {options.series} was asked for, but it has {len(scales)}: change series=", str(path)
        )
    scale = scales[options.series]
    levels = [level_array(path, found, str(each["path"]), options.threads) for each in scale.get("datasets", [])]
    if not levels:
        raise DataError(f"{path}: its OME metadata name no arrays: write it again", str(path))
    return OpenedFile(levels, axes_of(path, axis_names(scale), levels[0].shape, options))


def axes_of(path: Path, names: Sequence[str] | None, shape: Sequence[int], options: Options) -> Axes:
    """The axes of an array whose dims have these names, or none.

    A plane of a five-dimensional image, as most writers make them, is a picture; a volume may be one slice thin.
    """
    return resolved(str(path), named(names, shape), shape, options.axes, thin=len(shape) < 5)


def named(names: Sequence[str] | None, shape: Sequence[int]) -> str:
    """One letter for each dim: the first of its name, or a guess where the dims have no names."""
    if names is None or len(names) != len(shape) or not all(names):
        return guessed(shape)
    return "".join(name[0].upper() for name in names)


def level_array(path: Path, group: ZarrNode, key: str, threads: int) -> ZarrArray:
    """One level of a multiscale."""
    inner = node(group.path / key)
    if inner is None or not inner.is_array:
        raise DataError(
            f"{path}: its OME metadata name the array {key!r}, which is not there: the folder is incomplete; "
            "copy it again",
            str(path),
        )
    return open_array(inner.path, inner.version, threads)


def find(path: Path, key: str | None) -> ZarrNode:
    """The array or OME-Zarr image in a folder, at that key inside it."""
    at = path / key if key else path
    found = node(at)
    if found is None:
        below = arrays_below(path) if path.is_dir() else []
        hint = f"; below it there are {', '.join(below[:8])}: choose one with key=" if below else ""
        what = (
            f"{path} has nothing at key {key!r}"
            if key
            else f"{path} is a folder, but no Zarr: it has no zarr.json, .zarray or .zgroup"
        )
        raise DataError(f"{what}{hint}", str(path))
    if found.is_array or multiscales(found):
        return found
    layout: Any = found.attributes.get("ome", found.attributes)
    if not key and "bioformats2raw.layout" in layout and (first := node(at / "0")) is not None and multiscales(first):
        return first
    below = arrays_below(at)
    if not below:
        raise DataError(f"{at} is a Zarr group without an image in it", str(path))
    raise DataError(
        f"{at} is a Zarr group without OME metadata: choose one of {', '.join(below[:8])} with key=", str(path)
    )
