"""Measuring what halo exchanges cost on a mesh, once, by running small ones; every rank gets rank 0's numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.comm import fetch, stack
from mural.comm.messages import Transfer
from mural.geometry import Cuts, Interval
from mural.ranks import SPATIAL, Mesh
from mural.shard.autocasting import without_autocast
from mural.shard.halo.fuse_cost import Constants
from mural.shard.halo.margin import own_spans, wants_in
from mural.shard.layout import Layout, route
from mural.shard.tensor import ShardedTensor, local_of

REPEATS = 15
SMALLEST = 1e-7
MEBI = 2**20
MESSAGE = MEBI // 2
"""A message large enough for its time to depend mostly on its size; not larger, since buffers may linger."""
PIECE = {"cpu": 4 * MEBI, "cuda": 32 * MEBI}
"""The largest piece that may be copied to attach a window."""
CONVS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def measured(x: ShardedTensor) -> Constants:
    """The constants of the mesh, device and type of a tensor; collective over all ranks of the mesh."""
    mesh, device = x.mesh.now or x.mesh, x.device
    dtype = x.dtype if x.dtype.is_floating_point else torch.float32
    records, mesh.transport.records = mesh.transport.records, []
    try:
        with torch.enable_grad(), without_autocast(device):
            found = torch.tensor(_measure(mesh, device, dtype), dtype=torch.float64)
            rows = stack(found, mesh.peers(mesh.coordinates), mesh.rank, mesh.transport, "measured constants")
    finally:
        mesh.transport.records = records
    return Constants(*rows[0].tolist())


def _measure(mesh: Mesh, device: torch.device, dtype: torch.dtype) -> list[float]:
    n = len(mesh.spatial)
    small = ones(mesh, (4, *(8 * parts for parts in mesh.spatial)), device, dtype)
    weight = torch.ones((4, 4, *(3,) * n), dtype=dtype, device=device, requires_grad=True)
    wider = tuple(
        tuple(Interval(max(0, i.start - 1), min(extent, i.stop + 1)) for i in intervals) if d > 1 else intervals
        for d, (intervals, extent) in enumerate(zip(own_spans(small.placement), small.shape, strict=True))
    )
    path = route(small.placement, wants_in(wider, small.placement))

    def sharded() -> None:
        local_of(CONVS[n](small, weight, padding=1)).sum().backward()

    def plain() -> None:
        CONVS[n](small.local, weight, padding=1).sum().backward()

    def attached() -> None:
        fetch(small.local, path, mesh.transport, "measure").sum().backward()

    layer = torch.ones((1, 16, *(max(8, round(4096 ** (1 / n))),) * n), dtype=dtype, device=device)
    kernel = torch.ones((16, 16, *(3,) * n), dtype=dtype, device=device)
    work = 2 * kernel.numel() * layer[0, 0].numel()
    block = torch.ones(4 * MEBI // dtype.itemsize, dtype=dtype, device=device)
    little, much = (torch.ones(size // dtype.itemsize, dtype=dtype, device=device) for size in (1024, MESSAGE))
    message, large = (seconds(lambda b=b: exchange(mesh, b), device) for b in (little, much))
    strips = max(SMALLEST, (seconds(sharded, device) - seconds(plain, device)) / 2)
    with torch.no_grad():
        compute = seconds(lambda: CONVS[n](layer, kernel, padding=1), device)
    return [
        strips,
        min(strips, seconds(attached, device) / 2),  # the same message, and fewer kernels
        min(message, strips),
        MESSAGE / max(large - message, large / 4),
        work / compute,
        block.numel() * dtype.itemsize / seconds(block.clone, device),
        PIECE.get(device.type, 4 * MEBI),
    ]


def ones(mesh: Mesh, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> ShardedTensor:
    """An image of ones, cut evenly along the spatial axes."""
    axes = (None, None, *SPATIAL[: len(mesh.spatial)])
    cuts = (None, None, *(Cuts.even(n, parts) for n, parts in zip(shape[1:], mesh.spatial, strict=True)))
    images = tuple((a, c) for a, c in zip(axes, cuts, strict=True) if a is not None and c is not None)
    layout = Layout(mesh, (1, *shape), axes, cuts, images)
    return ShardedTensor(torch.ones(layout.local_shape, dtype=dtype, device=device, requires_grad=True), layout)


def exchange(mesh: Mesh, block: Tensor) -> None:
    """Send a block to each neighbour along the first spatial axis of several ranks, and receive as much."""
    axis = next(a for a in SPATIAL if mesh.size(a) > 1)
    at = mesh.coordinates[axis]
    peers = [mesh.rank_at(**{axis: c}) for c in (at - 1, at + 1) if 0 <= c < mesh.size(axis)]
    Transfer(mesh.transport, "measure", dict.fromkeys(peers, block), dict.fromkeys(peers, block.numel()), block).wait()


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, after two warm-up calls."""
    times: list[float] = []
    for _ in range(REPEATS + 2):
        settle(device)
        start = time.perf_counter()
        run()
        settle(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def settle(device: torch.device) -> None:
    """Wait for the calling stream, not for the whole device.

    Over NCCL, messages to other stages may wait there for receives that those stages post after the same measurement.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
