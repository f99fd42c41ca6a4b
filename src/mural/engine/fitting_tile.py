"""A streamed step on a device that need not be here, predicted; and the largest tile that fits into its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from mural.cost.hardware import Hardware
from mural.engine.held_model import HeldModel
from mural.engine.memory_room import room_for_kept
from mural.engine.stream_program import Given
from mural.engine.stream_report import MetaSource, PredictedStep, predicted_step
from mural.engine.streamed import Streamed
from mural.engine.streamed_batch import StreamedBatch
from mural.engine.tile_inputs import memory_format
from mural.errors import PlanError, UnsupportedOp
from mural.memory.choice import Room
from mural.memory.host_memory import HostMemory
from mural.plans import bytes_of
from mural.shard.generators import generators_kept

LEAST = 64
"""Tiles are multiples of it."""


class ForeseenSteps(Streamed):
    """Streamed steps with tiles of some size, on a device with that memory, next to a host with that memory."""

    def __init__(self, held: HeldModel, tile: Sequence[int], memory: int, host: int):
        super().__init__(held)
        self.plan = replace(held.plan, stream=tuple(tile))
        self.limits = memory, host

    def _room(self) -> Room:
        memory, host = self.limits
        itemsize = 2 if self.plan.precision == "bfloat16" else 8
        return room_for_kept(memory, host, itemsize)

    def limit(self) -> int | None:
        """The bytes of the device, as it was said."""
        return self.limits[0]

    def free_host(self) -> int:
        """How many bytes of the host are free, as it was said."""
        return self.limits[1]

    def host_memory(self, bands: int) -> HostMemory:
        """Memory of which nothing is taken."""
        return super().host_memory(0)


def foreseen_step(
    model: HeldModel, given: Sequence[Given], tile: Sequence[int], *, memory: int | str = "", host: int | None = None,
    hardware: str = "h200", raw: torch.dtype = torch.uint8, keep: str | None = None,
) -> PredictedStep:  # fmt: skip
    """What is predicted for a step on known hardware, of which a process may use `memory`, as "16GiB".

    `model` is one that streams, here. `given` are shape and type of image and target, from sources of the type `raw`.
    `keep` is "all" or "none" of the values that need not be kept; `host` is the host's free memory; without it,
    all that the hardware's host has.
    """
    known = Hardware.named(hardware)
    limit = known.memory if not memory else bytes_of(memory) if isinstance(memory, str) else memory
    way = ForeseenSteps(model, tile, limit, known.host_memory if host is None else host)
    way.keep = keep
    image, *targets = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in given)
    with generators_kept(model.device):
        batch = StreamedBatch(way, image, targets[0] if len(targets) == 1 else tuple(targets), "loss")
    step = predicted_step(batch)
    if step is None:
        raise PlanError("passes on whole tensors that ranks share are not predicted: predict them for one rank")
    form = memory_format(model.plain)
    inputs = {name: MetaSource(d, raw, form) for name, (_, d) in zip(batch.program.names, given, strict=True)}
    return replace(step, inputs=inputs, hardware=known, more=known.rates.workspace)


def fitting_tile(
    model: HeldModel, given: Sequence[Given], memory: int | str, *, hardware: str = "h200", host: int | None = None
) -> tuple[int, ...]:
    """The largest square tile whose step fits into a memory, as "16GiB"; raises PlanError where none does."""
    extents = given[0][0][2:]
    limit = bytes_of(memory) if isinstance(memory, str) else memory
    refused: dict[int, UnsupportedOp] = {}

    def peak(tile: int) -> int:
        sides = [min(tile, n) for n in extents]
        try:
            return foreseen_step(model, given, sides, memory=limit, host=host, hardware=hardware).peak.bytes
        except UnsupportedOp as error:  # a larger tile may do
            refused[tile] = error
            return 0

    found = largest_tile(peak, max(extents), limit)
    if found in refused:
        raise refused[found]
    return tuple(min(found, n) for n in extents)


def largest_tile(peak: Callable[[int], int], extent: int, limit: int) -> int:
    """The largest tile that divides an extent evenly and whose peak is within a limit; each is asked for once.

    >>> largest_tile(lambda tile: tile * tile, 1000, 90_000)
    256
    """
    peak = cache(peak)
    parts = -(-extent // LEAST)
    tiles = sorted({min(extent, -(-extent // (k * LEAST)) * LEAST) for k in range(1, parts + 1)})
    first, last = 0, len(tiles)  # those before `first` fit, those from `last` on do not
    while first < last:
        middle = (first + last) // 2
        if peak(tiles[middle]) <= limit:
            first = middle + 1
        else:
            last = middle
    if not first:
        raise PlanError(
            f"even tiles of {tiles[0]} need {peak(tiles[0]):,} bytes, but there are {limit:,}: use a smaller model, or "
            f"keep less between passes"
        )
    return tiles[first - 1]
