"""Putting tensors on the mesh: `shard`, by slicing a whole tensor or from pieces that ranks read themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from mural.comm import SPATIAL, Mesh
from mural.comm.exchange import box_of, stack
from mural.errors import LayoutError
from mural.geometry import Box, Cuts, check_bounds, whole
from mural.shard.gradients import require_gradient
from mural.shard.layout import Layout
from mural.shard.tensor import ShardedTensor

CutSpec = Cuts | Sequence[int] | Sequence[float]


def shard(
    tensor: Tensor,
    mesh: Mesh,
    *,
    dims: Sequence[int] | None = None,
    cuts: CutSpec | Sequence[CutSpec | None] | Mapping[int, CutSpec] | None = None,
    align: int = 1,
    box: Sequence[tuple[int, int]] | None = None,
) -> ShardedTensor:
    """The tensor cut over the mesh: dim 0 along the data axis, `dims` along the spatial axes.

    `dims` are by default 2, 3, … (NCL, NCHW, NCDHW); for a mask (N, H, W) give dims=(1, 2). `cuts` gives for each
    of them sizes, bounds or weights (floats); without it the pieces are as equal as multiples of `align` allow.
    With `box`, `tensor` is this rank's piece alone and the box its global place. Collective.
    """
    if isinstance(tensor, ShardedTensor):
        raise LayoutError("shard got a tensor that is sharded already: pass the plain tensor, or use it as it is")
    chosen = spatial_dims(tensor.ndim, mesh, dims)
    axes: dict[int, str] = dict(zip(chosen, SPATIAL, strict=False))
    if 0 not in axes:
        axes[0] = "data"
    elif mesh.size("data") > 1:
        raise LayoutError(f"dims={tuple(chosen)} cut dim 0, which the data axis of {mesh.size('data')} ranks needs")
    agree(tensor, mesh, box)
    if box is None:
        found = cuts_of(tensor.shape, mesh, axes, named(cuts, chosen, tensor.ndim), align)
        layout = layout_of(mesh, tuple(tensor.shape), axes, found)
        piece = tensor[tuple(slice(i.start, i.stop) for i in layout.box)]
        return ShardedTensor(piece.clone(memory_format=torch.preserve_format), layout)
    place = box_of(box)
    if tuple(i.size for i in place) != tuple(tensor.shape):
        raise LayoutError(f"box {place} has extents {[i.size for i in place]}, the piece {tuple(tensor.shape)}")
    found, shape = cuts_from_boxes(place, mesh, axes)
    x = ShardedTensor(tensor, layout_of(mesh, shape, axes, found))
    return require_gradient(x) if tensor.requires_grad and tensor.is_leaf else x


def spatial_dims(ndim: int, mesh: Mesh, dims: Sequence[int] | None) -> tuple[int, ...]:
    """The tensor dims that the mesh's spatial axes cut."""
    count = len(mesh.spatial)
    if dims is None:
        if ndim < 2 + count:
            raise LayoutError(
                f"a tensor of {ndim} dims has no {count} spatial dims behind batch and channel: "
                f"name them, as in dims=(1, 2) for a mask (N, H, W)"
            )
        return tuple(range(2, 2 + count))
    chosen = tuple(d % ndim if -ndim <= d < ndim else d for d in dims)
    if len(chosen) < count or len(set(chosen)) != len(chosen) or not all(0 <= d < ndim for d in chosen):
        raise LayoutError(
            f"dims={tuple(dims)} must name one dim of {ndim} for each of the {count} spatial axes {mesh.spatial}"
        )
    return chosen[:count]


def layout_of(mesh: Mesh, shape: tuple[int, ...], axes: Mapping[int, str], cuts: Mapping[int, Cuts]) -> Layout:
    """The layout of an image: what it says is what later layouts are derived from."""
    return Layout(
        mesh,
        shape,
        tuple(axes.get(d) for d in range(len(shape))),
        tuple(cuts.get(d) for d in range(len(shape))),
        tuple(sorted((axes[d], c) for d, c in cuts.items())),
    )


def named(cuts: Any, dims: Sequence[int], ndim: int) -> dict[int, CutSpec]:
    """The cuts by dim, from any of the forms that `shard` takes."""
    if cuts is None:
        return {}
    if isinstance(cuts, Mapping):
        return {d % ndim: spec for d, spec in cuts.items()}
    if isinstance(cuts, Cuts) or (len(cuts) and isinstance(cuts[0], (int, float))):
        cuts = (cuts,)
    if len(cuts) > len(dims):
        raise LayoutError(f"{len(cuts)} cuts were given for the {len(dims)} dims {tuple(dims)}")
    return {d: spec for d, spec in zip(dims, cuts, strict=False) if spec is not None}


def cuts_of(
    shape: Sequence[int], mesh: Mesh, axes: Mapping[int, str], specs: Mapping[int, CutSpec], align: int
) -> dict[int, Cuts]:
    """The cuts of every dim that belongs to an axis."""
    if align < 1:
        raise LayoutError(f"align={align} must be at least 1")
    if unknown := set(specs) - set(axes):
        raise LayoutError(f"cuts were given for dims {sorted(unknown)}, but the mesh cuts dims {sorted(axes)}")
    found: dict[int, Cuts] = {}
    for dim, axis in axes.items():
        parts, spec, step = mesh.size(axis), specs.get(dim), 1 if axis == "data" else align
        found[dim] = Cuts.even(shape[dim], parts, step) if spec is None else one_cut(spec, shape[dim], parts, step)
    return found


def one_cut(spec: CutSpec, extent: int, parts: int, align: int) -> Cuts:
    """Cuts from sizes, bounds, inner bounds or weights.

    >>> [one_cut(spec, 10, 2, 1).bounds for spec in ((4, 6), (0, 4, 10), (4,), (2.0, 3.0))]
    [(0, 4, 10), (0, 4, 10), (0, 4, 10), (0, 4, 10)]
    """
    if isinstance(spec, Cuts):
        bounds: Sequence[int] = spec.bounds
    elif not all(isinstance(n, Integral) for n in spec):
        if len(spec) != parts:
            raise LayoutError(f"{len(spec)} weights {tuple(spec)} were given for {parts} ranks")
        return Cuts.weighted(extent, spec, align)
    else:
        numbers = [int(n) for n in spec]
        bounds = {
            parts: (0, *(sum(numbers[: i + 1]) for i in range(parts))),
            parts - 1: (0, *numbers, extent),
        }.get(len(numbers), numbers)
    check_bounds(bounds, extent, parts)
    return Cuts.of(bounds)


def agree(tensor: Tensor, mesh: Mesh, box: Sequence[tuple[int, int]] | None) -> None:
    """Raise on every rank if the ranks brought tensors of different shapes or types."""
    if mesh.world == 1:
        return
    shape = list(tensor.shape) if box is None else [tensor.ndim]
    code = [*shape, -1, *(ord(c) for c in str(tensor.dtype)), -1, int(box is None)]
    mine = torch.tensor((code + [-2] * 64)[:64])
    rows = stack(mine, mesh.peers(mesh.coordinates), mesh.rank, mesh.transport, "shard")
    if not bool((rows == rows[0]).all()):
        seen = {tuple(int(n) for n in row[: row.tolist().index(-1)]) for row in rows}
        raise LayoutError(
            f"shard needs the same tensor on every rank, but ranks brought shapes {sorted(seen)} "
            f"(or types that differ; here {tensor.dtype}): pass the whole tensor everywhere, or box= with pieces"
        )


def cuts_from_boxes(mine: Box, mesh: Mesh, axes: Mapping[int, str]) -> tuple[dict[int, Cuts], tuple[int, ...]]:
    """The cuts that all ranks' boxes amount to, and the global shape."""
    code = torch.tensor([n for i in mine for n in i])
    rows = stack(code, mesh.peers(mesh.coordinates), mesh.rank, mesh.transport, "shard").tolist()
    boxes = {rank: box_of([(r[2 * d], r[2 * d + 1]) for d in range(len(mine))]) for rank, r in enumerate(rows)}
    shape = tuple(max(b[d].stop for b in boxes.values()) for d in range(len(mine)))
    cuts: dict[int, Cuts] = {}
    for dim, axis in axes.items():
        by_coordinate = {mesh.coordinates_of(rank)[axis]: b[dim] for rank, b in boxes.items()}
        bounds = [0, *(by_coordinate[c].stop for c in range(mesh.size(axis)))]
        check_bounds(bounds, shape[dim], mesh.size(axis))
        cuts[dim] = Cuts.of(bounds)
    layout = layout_of(mesh, shape, axes, cuts)
    wrong = {r: b for r, b in boxes.items() if b != layout.box_at(mesh.coordinates_of(r))}
    if wrong:
        rank = min(wrong)
        raise LayoutError(
            f"the boxes of the ranks do not tile {whole(shape)}: rank {rank} brought {wrong[rank]}, where the others "
            f"leave {layout.box_at(mesh.coordinates_of(rank))}; every row and column of the grid needs one interval"
        )
    return cuts, shape
