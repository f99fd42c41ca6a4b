"""The last units of an image: each that several ranks have parts of goes to one of them, which writes it once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from math import prod
from pathlib import Path

import numpy as np
import torch

from mural.comm.failure.agree import gather, together
from mural.comm.messages import Transfer
from mural.data.formats.dtypes import Array
from mural.data.source import pairs
from mural.data.writing.output import unwritable
from mural.data.writing.rims import Rim, Rims
from mural.data.writing.stores import StoredLevel
from mural.errors import DataError
from mural.geometry import Box, Interval, overlap, slices, volume
from mural.geometry.tile_grid import Index, grid, tile_at
from mural.ranks import AXES, Mesh

AT_ONCE = 64 * 2**20
"""Bytes of units that are sent and written together."""
Parts = dict[Index, dict[int, list[Box]]]
"""For each unit that is not complete, the boxes that each rank has of it."""


def settle(name: str, level: StoredLevel, rims: Rims, written: set[Index], mesh: Mesh | None) -> None:
    """Bring the parts of every unit together at the lowest rank that has one, and write them there."""
    shape, unit = level.shape, level.unit
    tables = gather(mesh, catalogue(shape, unit, rims, written), f"parts of {name}")
    parts, whole_units = listed(tables, shape, unit)
    check(name, parts, whole_units)
    for batch in batches(parts, prod(unit) * rims.dtype.itemsize):
        found = exchange(name, batch, parts, shape, unit, rims, mesh)
        with together(mesh, f"writing the last parts of {name}", DataError):
            for rim in found.values():
                try:
                    level.put(rim.box, rim.pixels)
                except (OSError, ValueError) as error:
                    raise unwritable(Path(name), error, f"box {pairs(rim.box)}", pairs(rim.box)) from error


def catalogue(shape: tuple[int, ...], unit: tuple[int, ...], rims: Rims, written: set[Index]) -> torch.Tensor:
    """One row for each unit that this rank wrote, and for each box that it has of another: number, whole, box."""
    counts, rows = grid(shape, unit), list[list[int]]()
    nowhere = [0] * (2 * len(shape))
    rows += [[int(np.ravel_multi_index(index, counts)), 1, *nowhere] for index in sorted(written)]
    for index in rims:
        box = tile_at(index, unit, shape)
        for part in Rim(box, np.empty(0), rims.missing(index, box)).parts:
            rows.append([int(np.ravel_multi_index(index, counts)), 0, *(n for interval in part for n in interval)])
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2 + 2 * len(shape))


def listed(
    tables: Mapping[int, torch.Tensor], shape: tuple[int, ...], unit: tuple[int, ...]
) -> tuple[Parts, dict[Index, list[int]]]:
    """The parts of units by rank, and the ranks that wrote whole ones."""
    counts = grid(shape, unit)
    parts: Parts = defaultdict(lambda: defaultdict(list))
    wholes: dict[Index, list[int]] = defaultdict(list)
    for rank, table in tables.items():
        for number, is_whole, *ends in table.tolist():
            index = tuple(int(i) for i in np.unravel_index(number, counts))
            if is_whole:
                wholes[index].append(rank)
            else:
                parts[index][rank].append(tuple(Interval(a, b) for a, b in zip(ends[0::2], ends[1::2], strict=True)))
    return parts, wholes


def check(name: str, parts: Parts, wholes: dict[Index, list[int]]) -> None:
    """Raise where two ranks wrote the same pixels: which of them counts would be chance. Every rank finds the same."""
    for index, ranks in wholes.items():
        both = sorted([*ranks, *parts.get(index, {})])
        if len(both) > 1:
            raise overlapping(name, both[0], both[1], f"unit {index}")
    for index, boxes in parts.items():
        held = [(rank, box) for rank, own in boxes.items() for box in own]
        for (a, x), (b, y) in combinations(held, 2):
            if volume(both := overlap(x, y)):
                raise overlapping(name, a, b, f"box {pairs(both)} of unit {index}")


def overlapping(name: str, a: int, b: int, what: str) -> DataError:
    """The error of two ranks that wrote the same."""
    return DataError(
        f"{name}: ranks {a} and {b} both wrote {what}: pieces of different ranks may not overlap; "
        "let one of them write it",
        name,
    )


def batches(parts: Parts, size: int) -> Iterator[list[Index]]:
    """The units in one order for all ranks, in batches that fit in memory."""
    order, step = sorted(parts), max(1, AT_ONCE // size)
    for start in range(0, len(order), step):
        yield order[start : start + step]


def exchange(
    name: str,
    batch: list[Index],
    parts: Parts,
    shape: tuple[int, ...],
    unit: tuple[int, ...],
    rims: Rims,
    mesh: Mesh | None,
) -> dict[Index, Rim]:
    """The units of the batch that this rank writes, complete with the others' parts."""
    own = mesh.rank if mesh is not None else 0
    mine = {index: rims.take(index, tile_at(index, unit, shape)) for index in batch if own in parts[index]}
    owners = {index: min(parts[index]) for index in batch}
    peers = [rank for rank in mesh.peers(AXES) if rank != own] if mesh is not None else []
    sends: dict[int, list[Array]] = {peer: [] for peer in peers}
    sizes = dict.fromkeys(peers, 0)
    width = rims.dtype.itemsize
    for index, owner in owners.items():
        for rank, boxes in parts[index].items():
            if rank == own and owner != rank:
                sends[owner] += [mine[index].pixels[slices(box, mine[index].box)].reshape(-1) for box in boxes]
            elif owner == own and owner != rank:
                sizes[rank] += sum(volume(box) for box in boxes) * width
    flat = {peer: as_bytes(arrays) for peer, arrays in sends.items()}
    arrived = swap(name, flat, sizes, mesh)
    for rank, received in arrived.items():
        buffer, offset = received.numpy().view(np.uint8), 0
        for index, owner in owners.items():
            for box in parts[index].get(rank, []) if owner == own else []:
                count = volume(box) * width
                pixels = buffer[offset : offset + count].view(rims.dtype).reshape([i.size for i in box])
                mine[index].paste(box, pixels)
                offset += count
    return {index: rim for index, rim in mine.items() if owners[index] == own}


def swap(
    name: str, sends: Mapping[int, torch.Tensor], sizes: Mapping[int, int], mesh: Mesh | None
) -> dict[int, torch.Tensor]:
    """The bytes that the peers send, a known number from each."""
    if mesh is None or not sends:
        return {}
    return Transfer(mesh.transport, f"parts of {name}", sends, sizes, next(iter(sends.values()))).wait()


def as_bytes(arrays: list[Array]) -> torch.Tensor:
    """Flat arrays one after the other, as bytes."""
    if not arrays:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.concatenate(arrays).view(np.uint8))
