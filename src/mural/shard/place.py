"""Putting tensors on the mesh: `shard`, by slicing a whole tensor or from pieces that ranks read themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isfinite
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor

from mural.comm.exchange import box_of
from mural.errors import LayoutError
from mural.geometry import Box, Cuts, Interval, check_bounds, whole
from mural.ranks import SPATIAL, Mesh
from mural.shard.checksum import checksum
from mural.shard.gradient_scale import require_gradient
from mural.shard.layout import Layout
from mural.shard.spread import part_of_whole
from mural.shard.tensor import ShardedTensor
from mural.shard.tensor_agreement import Brought, WholeOrOwn, agree, due

CutSpec = Cuts | Sequence[int] | Sequence[float]


def shard(
    tensor: Tensor,
    mesh: Mesh,
    *,
    dims: Sequence[int] | None = None,
    cuts: CutSpec | Sequence[CutSpec | None] | Mapping[int, CutSpec] | None = None,
    align: int = 1,
    box: Sequence[tuple[int, int]] | None = None,
    batch: WholeOrOwn = "whole",
) -> ShardedTensor:
    """The tensor cut over the mesh: dim 0 along the data (and channel) axes, `dims` along the spatial axes.

    `dims` are by default 2, 3, … (NCL, NCHW, NCDHW); for a mask (N, H, W) give dims=(1, 2), for labels (N,) dims=().
    `cuts` gives for each of them sizes, bounds or weights (floats); without it the pieces are as equal as multiples
    of `align` allow. With `box`, `tensor` is only this rank's piece and `box` its global place. Without, it is the same
    on every rank: the first tensors are compared, and later ones now and then. With batch="own", it has only the images
    of this rank's place on the data axis, whole, as a loader with a `mural.data.ImageSampler` gives them: those of all
    places, in order, are the batch. Then ranks that share images are compared. Collective.
    """
    return place_on(tensor, mesh, dims=dims, cuts=cuts, align=align, box=box, batch=batch, compare=box is None)


def place_on(
    tensor: Tensor,
    mesh: Mesh,
    *,
    dims: Sequence[int] | None = None,
    cuts: CutSpec | Sequence[CutSpec | None] | Mapping[int, CutSpec] | None = None,
    align: int = 1,
    box: Sequence[tuple[int, int]] | None = None,
    batch: WholeOrOwn = "whole",
    compare: bool = False,
) -> ShardedTensor:
    """The same as `shard`, with a choice whether ranks compare values. Collective."""
    try:
        place = None if box is None else box_of(box)
        mesh = mesh.folded if isinstance(mesh, Mesh) else mesh  # pyright: ignore[reportUnnecessaryIsInstance]
        axes = axes_of(tensor, mesh, dims)
        check_batch(batch, axes, place, cuts)
        layout = asked_layout(tensor, mesh, axes, cuts, align) if place is None else None
        if place is not None and tuple(i.size for i in place) != tuple(tensor.shape):
            raise LayoutError(f"box {place} has extents {[i.size for i in place]}, the piece {tuple(tensor.shape)}")
    except Exception:
        if isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            agree(mesh, None)
        raise
    needs = tensor.requires_grad
    value = checksum(tensor) if compare and due(tensor, mesh) else 0
    brought = Brought(None, tensor.ndim, axes, None, tensor.dtype, needs, align, batch)
    if layout is None:
        found, shape = cuts_from_boxes(agree(mesh, brought, place or (), value), mesh, axes)
        x = ShardedTensor(tensor, layout_of(mesh, shape, axes, found))
        return require_gradient(x) if needs and tensor.is_leaf else x
    if batch == "own":
        return own_images(tensor, layout, brought, value)
    agree(mesh, brought._replace(shape=layout.shape, cuts=layout.cuts), value=value)
    return ShardedTensor(part_of_whole(tensor, layout, layout.box), layout)


def check_batch(batch: str, axes: Mapping[int, str], box: Box | None, cuts: Any) -> None:
    """Raise if a call that says whose images it brings says something else as well."""
    if batch not in get_args(WholeOrOwn):
        raise LayoutError(f"batch={batch!r}: choose one of {get_args(WholeOrOwn)}")
    if batch == "own" and (box is not None or axes[0] != "data" or (isinstance(cuts, Mapping) and 0 in cuts)):
        raise LayoutError(
            'batch="own" says that dim 0 has the images of this rank: leave out box=, and dim 0 in cuts= and dims='
        )


def own_images(tensor: Tensor, layout: Layout, brought: Brought, value: int) -> ShardedTensor:
    """The images of this rank's place on the data axis as a part of the batch of all places. Collective.

    `layout` is that of these images alone; along dim 0 it means nothing.
    """
    mesh, shape = layout.mesh, layout.shape[1:]
    brought = brought._replace(shape=shape, cuts=layout.cuts[1:])
    places = agree(mesh, brought, (Interval(0, layout.shape[0]),), value)
    ranks = mesh.peers(mesh.coordinates)
    counts = {mesh.coordinates_of(rank)["data"]: box[0].size for rank, box in zip(ranks, places, strict=True)}
    images = Cuts.of((0, *accumulate(counts[part] for part in range(mesh.size("data")))))
    found = {d: c for d, c in enumerate(layout.cuts) if c is not None} | {0: images}
    joined = layout_of(mesh, (images.extent, *shape), brought.axes, found)
    return ShardedTensor(part_of_whole(tensor, joined, (*whole(tensor.shape[:1]), *joined.box[1:]), own=True), joined)


def asked_layout(tensor: Tensor, mesh: Mesh, axes: Mapping[int, str], cuts: Any, align: int) -> Layout:
    """The layout of a whole tensor, cut as a call asks for."""
    specs = named(cuts, [d for d, axis in axes.items() if axis != "data"], tensor.ndim)
    return layout_of(mesh, tuple(tensor.shape), axes, cuts_of(tensor.shape, mesh, axes, specs, align))


def axes_of(tensor: Tensor, mesh: Mesh, dims: Sequence[int] | None) -> dict[int, str]:
    """The mesh axis that each dim belongs to."""
    if isinstance(tensor, ShardedTensor):
        raise LayoutError("shard got a tensor that is sharded already: pass the plain tensor, or use it as it is")
    if not isinstance(tensor, Tensor) or not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"shard takes a tensor and the mesh of mural.init, not {type(tensor)} and {type(mesh)}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise LayoutError(f"shard takes dense tensors, not one of layout {kind}: convert it first, as by .to_dense()")
    axes: dict[int, str] = dict(zip(spatial_dims(tensor.ndim, mesh, dims), SPATIAL, strict=False))
    if 0 not in axes:
        axes[0] = "data"
    elif mesh.size("data") > 1:
        raise LayoutError(f"dims={dims} cut dim 0, which the data axis of {mesh.size('data')} ranks needs")
    return axes


def spatial_dims(ndim: int, mesh: Mesh, dims: Sequence[int] | None) -> tuple[int, ...]:
    """The tensor dims that the mesh's spatial axes cut."""
    count = len(mesh.spatial)
    if dims is None:
        if ndim < 2 + count:
            raise LayoutError(
                f"a tensor of {ndim} dims has no {count} spatial dims after batch and channel: "
                f"name them, as in dims=(1, 2) for a mask (N, H, W)"
            )
        return tuple(range(2, 2 + count))
    if not dims:
        return ()  # labels (N,): cut along the data axis alone
    chosen = tuple(d % ndim if -ndim <= d < ndim else d for d in dims)
    if len(chosen) < count or len(set(chosen)) != len(chosen) or not all(0 <= d < ndim for d in chosen):
        raise LayoutError(
            f"dims={tuple(dims)} must name one dim of {ndim} for each of the {count} spatial axes {mesh.spatial}"
        )
    return chosen[:count]


def layout_of(mesh: Mesh, shape: tuple[int, ...], axes: Mapping[int, str], cuts: Mapping[int, Cuts]) -> Layout:
    """The layout of an image, from which later layouts are derived."""
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
        if unknown := [d for d in cuts if not -ndim <= d < ndim]:
            raise LayoutError(f"cuts were given for dims {unknown} of a tensor of {ndim} dims")
        return {d % ndim: spec for d, spec in cuts.items()}
    if hasattr(cuts, "tolist"):
        cuts = cuts.tolist()
    if isinstance(cuts, Cuts) or (len(cuts) and isinstance(cuts[0], Real)):
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
        if not all(isfinite(w) for w in spec):
            raise LayoutError(f"the weights {tuple(spec)} of a cut must be finite numbers")
        return Cuts.weighted(extent, spec, align)
    else:
        numbers = [int(n) for n in spec]
        bounds = {
            parts: (0, *(sum(numbers[: i + 1]) for i in range(parts))),
            parts - 1: (0, *numbers, extent),
        }.get(len(numbers), numbers)
    check_bounds(bounds, extent, parts)
    return Cuts.of(bounds)


def cuts_from_boxes(
    places: Sequence[Box], mesh: Mesh, axes: Mapping[int, str]
) -> tuple[dict[int, Cuts], tuple[int, ...]]:
    """The cuts that all ranks' boxes amount to, and the global shape."""
    boxes = dict(zip(mesh.peers(mesh.coordinates), places, strict=True))
    shape = tuple(max(b[d].stop for b in places) for d in range(len(places[0])))
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
