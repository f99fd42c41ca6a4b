"""Micro-batches: the parts of a batch that follow each other through the stages, cut as `torch.chunk` cuts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from mural.engine.inputs import all_readable
from mural.geometry import Cuts
from mural.shard import ShardedTensor
from mural.shard.in_time import Rows
from mural.shard.relayout import relayout
from mural.shard.unread import Unread


def rows_of(images: int, parts: int) -> tuple[Rows, ...]:
    """The images of each micro-batch: equal numbers, the last may have fewer; no more micro-batches than images.

    >>> [(r.start, r.stop) for r in rows_of(5, 4)]
    [(0, 2), (2, 4), (4, 5)]
    """
    size = max(1, -(-images // parts))
    return tuple(Rows(start, min(images, start + size), images) for start in range(0, images, size))


def part_of(batch: Any, rows: Rows) -> Any:
    """Those images of a batch of inputs or targets: tensors, sharded tensors, lists of sources, and trees of these."""
    if rows.count == rows.total:
        return batch
    if isinstance(batch, ShardedTensor):
        return sharded_part(batch, rows)
    if isinstance(batch, Unread) and batch.shape[0] == rows.total:
        return batch.then(lambda x: sharded_part(x, rows), (rows.count, *batch.shape[1:]))
    if isinstance(batch, Tensor):
        return batch[rows.start : rows.stop] if batch.ndim and len(batch) == rows.total else batch
    if isinstance(batch, Mapping):
        return {key: part_of(value, rows) for key, value in cast("Mapping[str, Any]", batch).items()}
    if isinstance(batch, (tuple, list)):
        several = cast("list[Any]", batch)
        if all_readable(several) and len(several) == rows.total:
            return several[rows.start : rows.stop]
        return type(several)(part_of(value, rows) for value in several)
    return batch


def sharded_part(batch: ShardedTensor, rows: Rows) -> ShardedTensor:
    """Those images of a sharded tensor, cut again among the data ranks."""
    if batch.shape[0] != rows.total:
        return batch
    part: Any = batch[rows.start : rows.stop]
    if part.placement.axes[0] != "data":
        return part
    place = part.placement
    cuts = Cuts.even(rows.count, place.mesh.size("data"))
    images = tuple(sorted({**dict(place.images), "data": cuts}.items()))
    target = type(place)(place.mesh, place.shape, place.axes, (cuts, *place.cuts[1:]), images)
    moved = relayout(part, target, "micro-batch")
    return ShardedTensor(moved.local, target)
