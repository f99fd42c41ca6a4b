"""Pieces of tensors, and who writes which part of them into a checkpoint: pure data, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mural.errors import CheckpointError, LayoutError
from mural.geometry import Box, Cuts, Interval, disjoint, volume, whole
from mural.shard import ShardedTensor

BLOCK_BYTES = 2**26
"""The largest block that is written, checked and read as one: what a reader of a small part has to read at most."""
SMALL_BYTES = 2**20
"""Tensors are not split below this for the sake of balance."""
HERE = -1
"""Who needs what is read, among the numbers of the blocks that have it."""


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor: the values, the shape of the whole, and the part's global place."""

    tensor: Tensor
    shape: tuple[int, ...]
    box: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        sizes = tuple(stop - start for start, stop in self.box)
        inside = all(0 <= start <= stop <= n for (start, stop), n in zip(self.box, self.shape, strict=False))
        if len(self.box) != len(self.shape) or sizes != tuple(self.tensor.shape) or not inside:
            raise LayoutError(
                f"a piece of shape {tuple(self.tensor.shape)} at {[tuple(i) for i in self.box]} of a tensor of shape "
                f"{tuple(self.shape)}: the box needs one (start, stop) inside the shape for each dim of the piece"
            )

    @property
    def place(self) -> Box:
        """The global box, as intervals."""
        return tuple(Interval(*interval) for interval in self.box)


def as_piece(name: str, given: Tensor | Piece) -> Piece:
    """The piece that is given, or a full tensor as the piece that is all of it; strided plain tensors alone."""
    piece = given if isinstance(given, Piece) else None
    tensor = given.tensor if isinstance(given, Piece) else given
    if isinstance(tensor, ShardedTensor | DTensor):
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__}: give Piece(local tensor, global shape, box) instead"
        )
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(f"{name} is a {type(tensor).__name__}, not a tensor: give it among the values")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout} and type {tensor.dtype}"
        raise CheckpointError(f"{name} is {kind}: a checkpoint holds dense tensors that have values")
    return piece or Piece(tensor, tuple(tensor.shape), whole(tensor.shape))


class Offer(NamedTuple):
    """What a rank could write: one box of a tensor."""

    name: str
    dtype: str
    width: int
    shape: tuple[int, ...]
    box: Box


def offer(name: str, piece: Piece) -> Offer:
    """The description of a piece."""
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    return Offer(name, dtype, piece.tensor.itemsize, tuple(piece.shape), piece.place)


class WrittenPart(NamedTuple):
    """A box of a tensor that one rank writes."""

    name: str
    box: Box
    bytes: int


def divide(offers: Sequence[Sequence[Offer]]) -> tuple[tuple[WrittenPart, ...], ...]:
    """For each rank the parts that it writes: every position of every tensor once, the bytes balanced.

    What several ranks hold is split into blocks, which go to the rank with the least to write so far, largest first.

    >>> full = [Offer("w", "float32", 4, (6, 2**20), whole((6, 2**20)))]
    >>> [[part.bytes // 2**20 for part in parts] for parts in divide([full, full])]
    [[12], [12]]
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    known: dict[str, Offer] = {}
    for rank, own in enumerate(offers):
        for one in own:
            first = known.setdefault(one.name, one)
            if (first.dtype, first.shape) != (one.dtype, one.shape):
                raise CheckpointError(_disagreement(one.name, offers))
            holders.setdefault((one.name, one.box), []).append(rank)
    _check_cover(known, holders)
    total = sum(prod(one.shape) * one.width for one in known.values())
    limit = min(BLOCK_BYTES, max(SMALL_BYTES, -(-total // len(offers))))
    blocks: list[tuple[WrittenPart, list[int]]] = []
    for (name, box), ranks in holders.items():
        if volume(box) or not prod(known[name].shape):
            width = known[name].width
            blocks += [(WrittenPart(name, part, volume(part) * width), ranks) for part in split(box, width, limit)]
    load = [0] * len(offers)
    given: list[list[WrittenPart]] = [[] for _ in offers]
    for part, ranks in sorted(blocks, key=lambda block: (len(block[1]) > 1, -block[0].bytes)):
        rank = min(ranks, key=lambda r: load[r])
        load[rank] += part.bytes
        given[rank].append(part)
    return tuple(tuple(parts) for parts in given)


def split(box: Box, width: int, limit: int) -> list[Box]:
    """Boxes of at most `limit` bytes that make up a box, cut along its longest dim.

    >>> split(whole((2, 8)), 4, 32)
    [(Interval(start=0, stop=2), Interval(start=0, stop=4)), (Interval(start=0, stop=2), Interval(start=4, stop=8))]
    """
    bytes = volume(box) * width
    if bytes <= limit or volume(box) <= 1:
        return [box]
    dim = max(range(len(box)), key=lambda d: box[d].size)
    cuts = Cuts.even(box[dim].size, min(box[dim].size, -(-bytes // limit)))
    parts = [(*box[:dim], i.shift(box[dim].start), *box[dim + 1 :]) for i in cuts.intervals()]
    return [smaller for part in parts for smaller in split(part, width, limit)]


def _disagreement(name: str, offers: Sequence[Sequence[Offer]]) -> str:
    kinds = {r: f"{one.dtype} {one.shape}" for r, own in enumerate(offers) for one in own if one.name == name}
    said = ", ".join(f"rank {rank} has {kind}" for rank, kind in kinds.items())
    return (
        f"the ranks save different tensors as {name}: {said}; shape and type of the whole must be the same everywhere"
    )


def _check_cover(known: Mapping[str, Offer], holders: Mapping[tuple[str, Box], list[int]]) -> None:
    boxes: dict[str, list[Box]] = {}
    for name, box in holders:
        boxes.setdefault(name, []).append(box)
    for name, found in boxes.items():
        text = ", ".join(f"{[tuple(i) for i in box]} on rank {holders[name, box][0]}" for box in found)
        if not disjoint(found):
            raise CheckpointError(f"{name}: pieces overlap ({text}): boxes must be equal or disjoint")
        if sum(map(volume, found)) != prod(known[name].shape):
            raise CheckpointError(f"{name}: the pieces ({text}) do not cover its shape {known[name].shape}")
