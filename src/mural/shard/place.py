"""Putting tensors on the mesh: `shard`, by slicing a whole tensor or from pieces that ranks read themselves."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mural.comm import Transport
from mural.comm.exchange import box_of, stack
from mural.errors import LayoutError
from mural.geometry import Box, Cuts, check_bounds, slices, whole
from mural.ranks import SPATIAL, Mesh
from mural.shard.checksum import checksum
from mural.shard.gradient_scale import require_gradient
from mural.shard.layout import Layout
from mural.shard.tensor import ShardedTensor

ROOM = 13
"""How many dims fit into the message in which the ranks compare their tensors."""

CutSpec = Cuts | Sequence[int] | Sequence[float]

SAMPLERS = (
    "A plain tensor is the same whole batch on every rank, and each rank takes its part of it. Probably a "
    "DistributedSampler gave each rank other images, or random augmentations differ: leave the sampler out (Lightning: "
    "Trainer(use_distributed_sampler=False); Accelerate: do not prepare() the loader; torch: no DistributedSampler) "
    "and give all ranks one seed; or give each rank its own piece, by shard(piece, mesh, box=…), sources of "
    "mural.open(…), or mural.data.Loader"
)
"""What to do about tensors that differ between ranks."""

_looked: WeakKeyDictionary[Transport, Counter[Any]] = WeakKeyDictionary()
"""How many tensors of each kind were sharded."""


def shard(
    tensor: Tensor,
    mesh: Mesh,
    *,
    dims: Sequence[int] | None = None,
    cuts: CutSpec | Sequence[CutSpec | None] | Mapping[int, CutSpec] | None = None,
    align: int = 1,
    box: Sequence[tuple[int, int]] | None = None,
) -> ShardedTensor:
    """The tensor cut over the mesh: dim 0 along the data (and channel) axes, `dims` along the spatial axes.

    `dims` are by default 2, 3, … (NCL, NCHW, NCDHW); for a mask (N, H, W) give dims=(1, 2), for labels (N,) dims=().
    `cuts` gives for each of them sizes, bounds or weights (floats); without it the pieces are as equal as multiples
    of `align` allow. With `box`, `tensor` is only this rank's piece and `box` its global place. Without, it is the same
    on every rank: the first tensors are compared, and later ones now and then. Collective.
    """
    return place_on(tensor, mesh, dims=dims, cuts=cuts, align=align, box=box, compare=box is None)


def place_on(
    tensor: Tensor,
    mesh: Mesh,
    *,
    dims: Sequence[int] | None = None,
    cuts: CutSpec | Sequence[CutSpec | None] | Mapping[int, CutSpec] | None = None,
    align: int = 1,
    box: Sequence[tuple[int, int]] | None = None,
    compare: bool = False,
) -> ShardedTensor:
    """The same as `shard`, with a choice whether ranks compare values. Collective."""
    try:
        place = None if box is None else box_of(box)
        mesh = mesh.folded if isinstance(mesh, Mesh) else mesh  # pyright: ignore[reportUnnecessaryIsInstance]
        axes = axes_of(tensor, mesh, dims)
        if place is None:
            specs = named(cuts, [d for d, axis in axes.items() if axis != "data"], tensor.ndim)
            found = cuts_of(tensor.shape, mesh, axes, specs, align)
            layout = layout_of(mesh, tuple(tensor.shape), axes, found)
        else:
            layout = None
            if tuple(i.size for i in place) != tuple(tensor.shape):
                raise LayoutError(f"box {place} has extents {[i.size for i in place]}, the piece {tuple(tensor.shape)}")
    except Exception:
        if isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            agree(mesh, None)
        raise
    needs = tensor.requires_grad
    shape = None if layout is None else layout.shape
    cuts_found = None if layout is None else layout.cuts
    brought = (shape, tensor.ndim, axes, cuts_found, str(tensor.dtype), needs, align)
    boxes = agree(mesh, brought, place or (), checksum(tensor) if compare and due(tensor, mesh) else 0)
    if layout is not None:
        piece = tensor[slices(layout.box)]
        return ShardedTensor(piece.clone(memory_format=torch.preserve_format), layout)
    found, shape = cuts_from_boxes(boxes, mesh, axes)
    x = ShardedTensor(tensor, layout_of(mesh, shape, axes, found))
    return require_gradient(x) if needs and tensor.is_leaf else x


def axes_of(tensor: Tensor, mesh: Mesh, dims: Sequence[int] | None) -> dict[int, str]:
    """The mesh axis that each dim belongs to."""
    if isinstance(tensor, ShardedTensor):
        raise LayoutError("shard got a tensor that is sharded already: pass the plain tensor, or use it as it is")
    if not isinstance(tensor, Tensor) or not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"shard takes a tensor and the mesh of mural.init, not {type(tensor)} and {type(mesh)}")
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


def due(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether the values of this tensor are compared: the first four of each kind are, and two at each power of two."""
    if mesh.world == 1:
        return False
    seen, kind = _looked.setdefault(mesh.transport, Counter()), (mesh.sizes, tensor.ndim, tensor.dtype)
    seen[kind] += 1
    number = seen[kind]
    return number <= 4 or any(n & (n - 1) == 0 for n in (number, number - 1))


def agree(mesh: Mesh, brought: tuple[Any, ...] | None, place: Box = (), value: int = 0) -> list[Box]:
    """The places of all ranks' pieces; raises on every rank if they passed different tensors, or one passed None.

    `value` is the tensor's checksum, 0 if it is not compared.
    """
    if mesh.world == 1:
        return [place]
    text = repr(brought).encode()
    shape = [int(n) for n in (brought[0] or ())] if brought is not None else []
    code = [brought is not None, zlib.crc32(text), len(shape), *shape, *[0] * (ROOM - len(shape))][: 3 + ROOM]
    bounds = [n for i in place for n in i]
    row = torch.tensor([*code, *bounds, *[0] * (2 * ROOM - len(bounds)), value])
    rows = stack(row, mesh.peers(mesh.coordinates), mesh.rank, mesh.transport, "shard").tolist()
    if brought is None:
        return []
    failed = [rank for rank, row in enumerate(rows) if not row[0]]
    if failed:
        raise LayoutError(f"shard failed on ranks {failed}: see their errors")
    if len({row[1] for row in rows}) > 1:
        shapes = sorted({tuple(row[3 : 3 + row[2]]) for row in rows})
        raise LayoutError(
            f"shard needs the same tensor on every rank, and the same arguments, but ranks brought shapes {shapes}, or "
            f"cuts, types or requires_grad that differ (here {brought}): pass the whole tensor everywhere, or box="
        )
    # After calls that failed on some ranks only, ranks would compare different tensors: then none is compared.
    first, looked = rows[0][-1], all(row[-1] for row in rows)
    peers = mesh.peers(mesh.coordinates)
    if looked and (others := [rank for rank, row in zip(peers, rows, strict=True) if row[-1] != first]):
        raise LayoutError(
            f"shard: a tensor of shape {tuple(shape)} has other values on ranks {others} than on rank "
            f"{peers[0]}. {SAMPLERS}"
        )
    ends = [row[3 + ROOM :] for row in rows]
    return [box_of([(end[2 * d], end[2 * d + 1]) for d in range(len(place))]) for end in ends]


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
