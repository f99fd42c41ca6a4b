"""The largest tile of a streamed step that fits into a memory: found without running the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mural.cost.hardware import Hardware
from mural.engine.stream_program import Given, Loss, Objective, stream_program
from mural.engine.stream_report import MetaSource, PredictedStep, is_channels_last
from mural.engine.streamed import memory_format, total_stride
from mural.errors import PlanError
from mural.memory.tile_needs import Needs, grid_of
from mural.plans import bytes_of
from mural.ranks import SPATIAL

LEAST = 64
"""The smallest tile that is tried, where the image is larger."""


def prediction(
    model: nn.Module, loss: Loss, given: Sequence[Given], tile: Sequence[int], *, precision: str = "float32",
    hardware: Hardware | str | None = "h200", raw: torch.dtype = torch.uint8, keep: str | None = None,
) -> PredictedStep:  # fmt: skip
    """What is predicted for a step of a model on one device, with inputs from sources.

    `given` are shape and type of the image and of the target, which sources hold in the type `raw`.
    """
    objective = Objective(model, nn.Identity(), 1, loss, pytree.tree_flatten(0)[1])
    program = stream_program(objective, given, tile, keep)
    image = given[0][0]
    extents = {"data": image[0], **dict(zip(SPATIAL, image[2:], strict=False))}
    stride = total_stride(program, extents)
    sizes = {a: -(-n // stride) * stride for a, n in zip(SPATIAL, tile, strict=False)}
    needs = Needs(program.passes, grid_of(extents, {"data": 1, **sizes}, {}))
    form = memory_format(model)
    inputs = {name: MetaSource(dtype, raw, form) for name, (_, dtype) in zip(program.names, given, strict=True)}
    held = {**dict(objective.named_parameters()), **dict(objective.named_buffers()), **program.graph.held}
    known = Hardware.named(hardware) if isinstance(hardware, str) else hardware
    lower = torch.bfloat16 if precision == "bfloat16" else None
    more = 0 if known is None else known.rates.workspace
    return PredictedStep(program, needs, inputs, (), held, lower, known, is_channels_last(held), more)


def fitting_tile(
    model: nn.Module, loss: Loss, given: Sequence[Given], memory: int | str, *, precision: str = "float32",
    hardware: Hardware | str | None = "h200",
) -> tuple[int, ...]:  # fmt: skip
    """The largest square tile whose step fits into a memory, as "16GiB"; raises PlanError where none does."""

    def peak(tile: int) -> int:
        sides = tuple(min(tile, n) for n in given[0][0][2:])
        return prediction(model, loss, given, sides, precision=precision, hardware=hardware).peak.bytes

    extents = given[0][0][2:]
    limit = bytes_of(memory) if isinstance(memory, str) else memory
    found = largest_tile(peak, max(extents), limit)
    return tuple(min(found, n) for n in extents)


def largest_tile(peak: Callable[[int], int], extent: int, limit: int) -> int:
    """The largest tile that divides an extent evenly and whose peak is within a limit.

    >>> largest_tile(lambda tile: tile * tile, 1000, 90_000)
    256
    """
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
