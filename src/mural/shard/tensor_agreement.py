"""Agreement on a tensor: whether the ranks gave `shard` tensors that fit together, by one exchange of a few numbers."""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mural.comm import Transport
from mural.comm.exchange import box_of, stack
from mural.errors import LayoutError
from mural.geometry import Box, Cuts
from mural.ranks import Mesh

WholeOrOwn = Literal["whole", "own"]

ROOM = 13
"""How many dims fit into the message in which the ranks compare their tensors."""

SAMPLERS = (
    "A plain tensor is the same whole batch on every rank, and each rank takes its part of it. Probably a "
    "DistributedSampler gave each rank other images, or random augmentations differ: leave the sampler out (Lightning: "
    "Trainer(use_distributed_sampler=False); Accelerate: do not prepare() the loader; torch: no DistributedSampler) "
    "and give all ranks one seed; or give each rank its own images, by mural.data.ImageSampler and shard(…, mesh, "
    'batch="own"), or its own piece, by shard(piece, mesh, box=…), sources of mural.open(…), or mural.data.Loader'
)
"""What to do about tensors that differ between ranks."""

SHARED_IMAGES = (
    "Ranks that hold pieces of one image need the same sample: give the loader "
    "sampler=mural.data.ImageSampler(dataset, mesh) and no other sampler (Accelerate: do not prepare() the loader), "
    "and let random augmentations draw the same on these ranks"
)
"""What to do about images that differ between the ranks that share them."""

_looked: WeakKeyDictionary[Transport, Counter[Any]] = WeakKeyDictionary()
"""How many tensors of each kind were sharded."""


class Brought(NamedTuple):
    """What has to be the same in the calls of all ranks."""

    shape: tuple[int, ...] | None
    """None where ranks bring pieces; without the number of images where each rank brings its own."""
    ndim: int
    axes: Mapping[int, str]
    cuts: tuple[Cuts | None, ...] | None
    dtype: torch.dtype
    requires_grad: bool
    align: int
    batch: WholeOrOwn


def due(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether the values of this tensor are compared: the first four of each kind are, and two at each power of two."""
    if mesh.world == 1:
        return False
    seen, kind = _looked.setdefault(mesh.transport, Counter()), (mesh.sizes, tensor.ndim, tensor.dtype)
    seen[kind] += 1
    number = seen[kind]
    return number <= 4 or any(n & (n - 1) == 0 for n in (number, number - 1))


def agree(mesh: Mesh, brought: Brought | None, place: Box = (), value: int = 0) -> list[Box]:
    """The places of all ranks' pieces; raises on every rank if they passed different tensors, or one passed None.

    `value` is the tensor's checksum, 0 if it is not compared. Of own images, `place` says how many there are.
    """
    if mesh.world == 1:
        return [place]
    text = repr(brought).encode()
    shape = [int(n) for n in (brought.shape or ())] if brought is not None else []
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
    ends = [row[3 + ROOM :] for row in rows]
    places = [box_of([(end[2 * d], end[2 * d + 1]) for d in range(len(place))]) for end in ends]
    # After calls that failed on some ranks only, ranks would compare different tensors: then none is compared.
    looked = all(row[-1] for row in rows)
    values = [row[-1] if looked else 0 for row in rows]
    if brought.batch == "own":
        compare_images(mesh, brought, places, values)
    else:
        compare_wholes(mesh, brought, values)
    return places


def compare_wholes(mesh: Mesh, brought: Brought, values: Sequence[int]) -> None:
    """Raise if the checksums of all ranks' tensors are not the same."""
    peers = mesh.peers(mesh.coordinates)
    if others := [rank for rank, value in zip(peers, values, strict=True) if value != values[0]]:
        raise LayoutError(
            f"shard: a tensor of shape {brought.shape} has other values on ranks {others} than on rank "
            f"{peers[0]}. {SAMPLERS}"
        )


def compare_images(mesh: Mesh, brought: Brought, places: Sequence[Box], values: Sequence[int]) -> None:
    """Raise on every rank if ranks that share images brought other numbers of them, or other checksums."""
    groups: dict[int, dict[int, tuple[int, int]]] = {}
    for rank, place, value in zip(mesh.peers(mesh.coordinates), places, values, strict=True):
        groups.setdefault(mesh.coordinates_of(rank)["data"], {})[rank] = (place[0].size, value)
    for group in groups.values():
        first = min(group)
        if others := [rank for rank, images in group.items() if images != group[first]]:
            counts = " and ".join(str(count) for count in sorted({group[rank][0] for rank in (first, *others)}))
            raise LayoutError(
                f'shard(…, batch="own"): ranks {others} brought other images than rank {first}, which shares them '
                f"({counts} of shape {brought.shape}). {SHARED_IMAGES}"
            )
    if len(groups) > 1 and brought.dtype.is_floating_point and any(values) and len(set(values)) == 1:
        warnings.warn(
            f'shard(…, batch="own"): all {len(groups)} parts of the batch are the same images. Probably a sampler is '
            f"missing: DataLoader(…, sampler=mural.data.ImageSampler(dataset, mesh))",
            stacklevel=6,  # the caller of shard
        )
