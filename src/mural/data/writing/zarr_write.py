"""Zarr v3 arrays that are made, with or without shards, and the OME-Zarr group around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mural.data.formats.dtypes import NUMPY, TORCH
from mural.data.formats.ngff import group_metadata
from mural.data.formats.zarr import kvstore, ts
from mural.errors import DataError

TILE = {2: (512, 512), 3: (64, 128, 128)}
"""What a chunk spans of two and of three spatial dims, unless said otherwise."""
SHARD = 8
SHARD_BYTES = 64 * 2**20
"""The most chunks of a shard along a spatial dim, and the most bytes before compression."""
FEW = 4
"""Up to this many channels are kept together."""


def names(shape: Sequence[int]) -> str:
    """The names of the dims of an array with channels first."""
    return "cyx" if len(shape) == 3 else "czyx"


def check_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as plain numbers; an error unless it is (C, H, W) or (C, D, H, W) without empty dims."""
    found = tuple(int(n) for n in shape)
    if len(found) not in (3, 4) or min(found) < 1:
        raise DataError(f"{name}: shape {found} is not (C, H, W) or (C, D, H, W) with extents of at least 1", name)
    return found


def check_dtype(name: str, dtype: torch.dtype | np.dtype[Any] | type | str) -> np.dtype[Any]:
    """The type of pixels in numpy; an error where images are not written with it."""
    written = [kind for kind in TORCH if kind != "bfloat16"]
    found = NUMPY.get(dtype, "") if isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    if found not in written:
        raise DataError(f"{name}: images of type {dtype} are not written: choose one of {', '.join(written)}", name)
    return np.dtype(found)


def chunks_of(name: str, shape: Sequence[int], chunks: Sequence[int] | None) -> tuple[int, ...]:
    """The chunk of an array: what was asked for, or all of few channels and a tile of each spatial dim.

    >>> chunks_of("x", (3, 9000, 300), None), chunks_of("x", (30, 40, 500, 500), None)
    ((3, 512, 300), (1, 40, 128, 128))
    """
    channels = shape[0] if shape[0] <= FEW else 1
    found = tuple(chunks) if chunks is not None else (channels, *TILE[len(shape) - 1])
    if len(found) != len(shape) or min(found) < 1:
        raise DataError(f"{name}: chunks {found} do not fit the shape {tuple(shape)}: give one extent per dim", name)
    return tuple(min(int(chunk), extent) for chunk, extent in zip(found, shape, strict=True))


def shard_of(
    name: str, shape: Sequence[int], chunks: Sequence[int], width: int, shard: Sequence[int] | None
) -> tuple[int, ...]:
    """The shard of an array: what was asked for, or several chunks per spatial dim up to a number of bytes.

    >>> shard_of("x", (3, 9000, 9000), (3, 512, 512), 1, None), shard_of("x", (3, 600, 600), (3, 512, 512), 1, None)
    ((3, 4096, 4096), (3, 1024, 1024))
    """
    # More chunks than the array has would only make the index longer.
    most = [-(-extent // chunk) for extent, chunk in zip(shape, chunks, strict=True)]
    if shard is not None:
        if len(shard) != len(shape) or any(s < c or s % c for s, c in zip(shard, chunks, strict=True)):
            raise DataError(
                f"{name}: shard {tuple(shard)} is not made of whole chunks of {tuple(chunks)}: give a multiple per dim",
                name,
            )
        return tuple(chunk * min(s // chunk, n) for s, chunk, n in zip(shard, chunks, most, strict=True))
    counts = [1, *(min(SHARD, n) for n in most[1:])]
    while max(counts) > 1 and prod(counts) * prod(chunks) * width > SHARD_BYTES:
        counts[counts.index(max(counts))] //= 2
    return tuple(chunk * n for chunk, n in zip(chunks, counts, strict=True))


def codecs(dtype: np.dtype[Any]) -> list[dict[str, Any]]:
    """How a chunk becomes bytes: compressed, with a checksum, so that a damaged chunk is found when it is read."""
    order: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        order["configuration"] = {"endian": "little"}
    return [order, {"name": "zstd", "configuration": {"level": 3}}, {"name": "crc32c"}]


def create_array(
    path: Path, shape: Sequence[int], dtype: np.dtype[Any], chunks: Sequence[int], shard: Sequence[int] | None
) -> Any:
    """A new array of zeros, opened for writing."""
    inner = codecs(dtype)
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {"chunk_shape": list(chunks), "codecs": inner, "index_codecs": index}
    metadata = {
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard or chunks)}},
        "codecs": inner if shard is None else [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": list(names(shape)),
    }
    return ts.open(spec(path) | {"metadata": metadata}, create=True).result()


def spec(path: Path) -> dict[str, Any]:
    """How tensorstore finds an array to write; it keeps nothing in memory that is written.

    It does not wait for the disk after each chunk: what has no name yet has nothing to lose.
    """
    kept = {"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False}
    return {"driver": "zarr3", "kvstore": kvstore(path), "context": kept}


def write_group(
    path: Path,
    name: str,
    shape: Sequence[int],
    scales: list[tuple[float, ...]],
    method: str,
    spacing: tuple[float, ...] = (),
) -> None:
    """Write the metadata that make a folder of arrays an OME-Zarr image; pixels of a known size have micrometers."""
    text = json.dumps(group_metadata(name, names(shape), scales, method, spacing), indent=1)
    (path / "zarr.json").write_text(text + "\n", encoding="utf-8")
