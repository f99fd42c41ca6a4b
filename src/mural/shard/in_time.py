"""Which images of a batch a micro-batch has."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from mural.errors import OutOfTime
from mural.geometry import Cuts
from mural.shard.folds.regroup import spans
from mural.shard.layout import Layout
from mural.shard.tensor import ShardedTensor


@dataclass(frozen=True)
class Rows:
    """The images from `start` to `stop` - 1 of a batch of `total`."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """How many images these are."""
        return self.stop - self.start


_rows: list[Rows | None] = [None]
"""One for all threads: a checkpoint may recompute its region in a thread of the autograd engine."""


@contextmanager
def rows_of_batch(rows: Rows | None) -> Generator[None]:
    """In this block, tensors hold these images of a larger batch."""
    _rows.append(rows)
    try:
        yield
    finally:
        _rows.pop()


def current_rows() -> Rows | None:
    """The images that tensors hold now."""
    return _rows[-1]


def lifted(x: Tensor, part: int, every: Sequence[Rows]) -> Tensor:
    """A micro-batch as a piece of its batch; a tensor without images as one that every micro-batch holds whole."""
    if len(every) == 1 or not isinstance(x, ShardedTensor):
        return x
    layout, rows = x.placement, every[part]
    mesh = layout.mesh.at_time(part, len(every))
    if not layout.ndim or layout.axes[0] != "data" or layout.shape[0] != rows.count:
        axes = tuple(None if axis == "data" else axis for axis in layout.axes)
        whole = replace(layout.gathered(d for d, a in enumerate(layout.axes) if a == "data"), mesh=mesh, axes=axes)
        return ShardedTensor(x.local, whole, x.aliased, x.folds)
    ranks = layout.mesh.size("data")
    sizes = [i.size for other in every for i in Cuts.even(other.count, ranks).intervals()]
    cuts = Cuts.sized(sizes)
    images = tuple((axis, cuts if axis == "data" else c) for axis, c in layout.images)
    found = Layout(mesh, (rows.total, *layout.shape[1:]), layout.axes, (cuts, *layout.cuts[1:]), images)
    return ShardedTensor(x.local, found, x.aliased, x.folds)


def lowered(x: Tensor) -> Tensor:
    """A piece of a batch as a separate batch; other tensors unchanged."""
    if not isinstance(x, ShardedTensor) or x.mesh.now is None:
        return x
    return ShardedTensor(x.local, layout_now(x.placement), x.aliased, x.folds)


@lru_cache(maxsize=4096)
def layout_now(layout: Layout) -> Layout:
    """The layout of a piece of a batch, as a separate batch."""
    if layout.mesh.now is None:
        return layout
    cuts, shape = list(layout.cuts), list(layout.shape)
    for dim in data_dims(layout):
        here = present(layout.cuts[dim], layout)
        cuts[dim], shape[dim] = here, here.extent
    images = tuple((a, present(c, layout) if a == "data" else c) for a, c in layout.images)
    return Layout(layout.mesh.now, tuple(shape), layout.axes, tuple(cuts), images)


def raised_again(y: ShardedTensor, like: ShardedTensor) -> ShardedTensor:
    """A result in the shape of the micro-batch that `lowered` made, as a piece of the batch again."""
    return ShardedTensor(y.local, like.placement, y.aliased, like.folds)


def data_dims(layout: Layout) -> tuple[int, ...]:
    """The dims that are cut along the images of a batch, into one piece or several."""
    return tuple(d for d, axis in enumerate(layout.axes) if axis == "data" and layout.cuts[d] is not None)


def batch_dim(x: Any) -> int | None:
    """The dim of a tensor along which its micro-batches follow each other; None for one without images."""
    found = data_dims(x.placement) if isinstance(x, ShardedTensor) else ()
    if not isinstance(x, ShardedTensor) or not found:
        return None
    if not x.folds:
        return found[0]
    # Merged dims are one dim of the tensor: if the images come first in it, micro-batches follow each other.
    dim, (start, _) = next((i, s) for i, s in enumerate(spans(x.folds)) if s[0] <= found[0] < s[1])
    if start != found[0]:
        raise OutOfTime("a result in which images are merged after other dims: use microbatches = 1")
    return dim


def present(cuts: Cuts | None, layout: Layout) -> Cuts:
    """The cuts of the images that are here now, numbered from 0."""
    if cuts is None or layout.mesh.now is None:
        raise OutOfTime("a dim that no time cuts")
    if cuts.owners != tuple(range(cuts.parts)):
        raise OutOfTime("a result whose images are in another order than those of the batch: use microbatches = 1")
    ranks = layout.mesh.now.size("data")
    first = layout.mesh.coordinates["data"] // ranks * ranks
    bounds = cuts.bounds[first : first + ranks + 1]
    return Cuts.of([b - bounds[0] for b in bounds])
