"""Picking and writing values by an index of the same dims: `gather` and `scatter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.folds.reshape import settled
from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.ops.pointwise.elementwise import check_writable, piece_of
from mural.shard.ops.reduce.order import whole_along
from mural.shard.ops.view.slices import sliced
from mural.shard.ops.windowed.data_windows import part_at
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor, local_of


@register("along a dim", "gather")
def gather(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The values that an index names along a dim, which is gathered first if it is cut and small enough."""
    x, dim, index, sparse = bound(args, kwargs, ("input", "dim", "index", "sparse_grad"), False)
    if not isinstance(x, ShardedTensor):
        return func(x, dim, index.full(), sparse_grad=sparse)
    dim = dim_of(dim, x.ndim, "gather")
    if index.ndim != x.ndim or any(
        n > m for d, (n, m) in enumerate(zip(index.shape, x.shape, strict=True)) if d != dim
    ):
        raise RuntimeError(
            f"gather: an index of shape {tuple(index.shape)} along dim {dim} of a tensor of shape {tuple(x.shape)}"
        )
    for d, n in enumerate(index.shape):
        if d != dim and n < x.shape[d]:
            x = sliced(x, d, 0, n)
    x = whole_along(x, (dim,), f"gather with an index of shape {tuple(index.shape)}")
    layout = x.placement.with_cut(dim, None, index.shape[dim])
    return ShardedTensor(func(x.local, dim, part_at(index, layout, "gather"), sparse_grad=sparse), layout)


@register("along a dim", "scatter", "scatter_", "scatter_add", "scatter_add_")
def scatter(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Writing along a dim that is not cut; into a plain tensor, with the whole index."""
    name = name_of(func)
    given = dict(zip(("input", "dim", "index", "src"), args, strict=False)) | kwargs
    if "src" in given and not isinstance(given["src"], Tensor):
        given["value"] = given.pop("src")
    x, dim, index = given["input"], given["dim"], given["index"]
    if not isinstance(x, ShardedTensor) and isinstance(index, ShardedTensor) and index.mesh.tiled:
        return scattered_tile(func, x, given, name)
    if not isinstance(x, ShardedTensor):
        rest = [a.full() if isinstance(a, ShardedTensor) else a for a in args[1:]]
        return func(x, *rest, **{k: v.full() if isinstance(v, ShardedTensor) else v for k, v in kwargs.items()})
    if name.endswith("_"):
        check_writable(x, name)
    dim = dim_of(dim, x.ndim, name)
    layout = x.placement.with_cut(dim, x.placement.cuts[dim], index.shape[dim]) if index.ndim == x.ndim else None
    if layout is None or x.placement.is_cut(dim) or tuple(index.shape) != layout.shape:
        raise UnsupportedOp(
            f"{name} along dim {dim} of a sharded tensor of shape {tuple(x.shape)}, where dims {x.placement.cut_dims} "
            f"are cut, with an index of shape {tuple(index.shape)}: the dim must not be cut, and the index must have "
            f"the tensor's other extents. Call .full() on both first, or write with torch.where or masked_fill"
        )
    layout = x.placement.with_cut(dim, None, index.shape[dim])
    values = {
        k: piece_of(settled(v), layout, name) if isinstance(v, Tensor) and v.ndim else local_of(v)
        for k, v in given.items()
        if k != "input"
    }
    result = func(x.local, **values)
    return x if result is x.local else ShardedTensor(result, x.placement)


def scattered_tile(func: Callable[..., Any], x: Tensor, given: Mapping[str, Any], name: str) -> ShardedTensor:
    """A tile of a plain tensor, written to where a tile's index says; the tensor itself stays as it was."""
    index, dim = given["index"], dim_of(given["dim"], x.ndim, name)
    layout = index.placement if index.ndim == x.ndim and not index.folds else None
    if layout is None or layout.is_cut(dim) or layout.with_cut(dim, None, x.shape[dim]).shape != tuple(x.shape):
        raise UnsupportedOp(
            f"{name} along dim {dim} of a tensor of shape {tuple(x.shape)}, with a tile's index of shape "
            f"{tuple(index.shape)}: the dim must not be cut, and the index must have the tensor's other extents"
        )
    wide = layout.with_cut(dim, None, x.shape[dim])
    values = {k: piece_of(settled(v), layout, name) if isinstance(v, Tensor) and v.ndim else local_of(v)
              for k, v in given.items() if k != "input"}  # fmt: skip
    return ShardedTensor(func(piece_of(x, wide, name).clone(memory_format=torch.contiguous_format), **values), wide)
