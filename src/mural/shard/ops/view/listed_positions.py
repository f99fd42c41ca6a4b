"""Listed positions: parts of a tensor that tensors of positions select, along one dim or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mural.errors import LayoutError, UnsupportedOp
from mural.shard.folds.reshape import settled
from mural.shard.layout import Layout
from mural.shard.ops.pointwise.elementwise import check_writable, piece_of
from mural.shard.relayout import gather
from mural.shard.tensor import ShardedTensor

Listed = Mapping[int, Tensor]
"""Tensors of positions by the dim that they index; they are broadcast against each other."""


def whole_index(index: Tensor) -> Tensor:
    """The positions as a plain tensor, which every rank holds."""
    index = settled(index)
    if not isinstance(index, ShardedTensor):
        return index
    if not index.placement.cut_dims:
        return index.local
    if index.dtype == torch.bool:
        raise UnsupportedOp(
            f"indexing with a sharded tensor (a mask) of shape {tuple(index.shape)}: how many positions it picks is "
            f"not known before. Use torch.where or masked_fill, or call .full() on both"
        )
    raise UnsupportedOp(
        f"indexing a sharded tensor with a sharded tensor of positions, of shape {tuple(index.shape)}: call .full() on "
        f"the index if it fits on one rank, or use gather or index_select along a dim that is not cut"
    )


def positions_of(index: Tensor, shape: Sequence[int], dim: int) -> dict[int, Tensor]:
    """Positions by dim; a mask stands for the positions where it is true, in as many dims as it has."""
    index = whole_index(index)
    if index.dtype != torch.bool:
        return {dim: index}
    if tuple(index.shape) != tuple(shape[dim : dim + index.ndim]):
        raise IndexError(
            f"a mask of shape {tuple(index.shape)} for dims {dim} to {dim + index.ndim - 1} of a tensor of shape "
            f"{tuple(shape)}"
        )
    return {dim + i: found for i, found in enumerate(index.nonzero().unbind(1))}


def listed_layout(layout: Layout, index: Listed) -> Layout:
    """The layout of the selection: the new dims where the listed ones were, or first if others are between those."""
    dims = sorted(index)
    new = torch.broadcast_shapes(*(tuple(i.shape) for i in index.values()))
    kept = [d for d in range(layout.ndim) if d not in index]
    at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    # Along one dim the positions keep that dim's axis, along which they may be cut again.
    origins: list[int | None] = [dims[0]] if len(dims) == len(new) == 1 else [None] * len(new)
    shape = [layout.shape[d] for d in kept]
    place = layout.gathered(dims).pick([*kept[:at], *origins, *kept[at:]], [*shape[:at], *new, *shape[at:]])
    return place


def brackets(index: Listed) -> tuple[Tensor | slice, ...]:
    """The index of a plain tensor."""
    return tuple(index.get(d, slice(None)) for d in range(max(index) + 1))


def taken(x: ShardedTensor, index: Listed) -> ShardedTensor:
    """The values at the listed positions; an indexed dim is gathered first if it is cut."""
    x = gather(x, sorted(index), "indexing")
    check_range(x, index)
    return ShardedTensor(x.local[brackets(index)], listed_layout(x.placement, index))


def check_range(x: ShardedTensor, index: Listed) -> None:
    """Raise for a position out of range on a rank without data, as torch does on the others."""
    for dim, positions in index.items() if not x.local.numel() else ():
        if bool(((positions < -x.shape[dim]) | (positions >= x.shape[dim])).any()):
            raise IndexError(f"indexing: a position is out of range for dim {dim} of extent {x.shape[dim]}")


def write_listed(x: ShardedTensor, index: Listed, value: Tensor) -> None:
    """Write to the listed positions of dims that are not cut."""
    check_writable(x, "assignment to listed positions")
    if cut := [d for d in index if x.placement.is_cut(d)]:
        raise UnsupportedOp(
            f"assignment to listed positions of dims {cut} of a sharded tensor of shape {tuple(x.shape)}, which are "
            f"cut: use torch.where or masked_fill"
        )
    check_range(x, index)
    layout = listed_layout(x.placement, index)
    x.local[brackets(index)] = piece_of(fitting(value, layout), layout, "assignment").to(x.dtype)


def fitting(value: Tensor, layout: Layout) -> Tensor:
    """A value to assign, without first dims of extent 1 that the target does not have."""
    while value.ndim > layout.ndim and value.shape[0] == 1:
        value = value.squeeze(0)
    if value.ndim > layout.ndim:
        raise LayoutError(f"assignment: a value of shape {tuple(value.shape)} does not fit into {layout.shape}")
    return value


def looked_up(table: Tensor, index: Sequence[object]) -> ShardedTensor:
    """Rows of a plain table, one for each of the sharded positions."""
    positions = settled(index[0])
    if len(index) > 1 or not isinstance(positions, ShardedTensor) or positions.dtype == torch.bool:
        what = "mask" if isinstance(positions, Tensor) and positions.dtype == torch.bool else "positions among others"
        raise UnsupportedOp(
            f"indexing a plain tensor of shape {tuple(table.shape)} with a sharded tensor ({what}): call .full() on "
            f"the index"
        )
    rest = tuple(table.shape[1:])
    layout = positions.placement.pick([*range(positions.ndim), *[None] * len(rest)], (*positions.shape, *rest))
    return ShardedTensor(table[positions.local], layout)
