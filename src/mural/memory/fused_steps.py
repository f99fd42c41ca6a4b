"""Steps of a tape that one kernel does: a norm, and the activation after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mural.memory.tape import Slot, Step, slots_in
from mural.shard.ops.norm.channel_kernels import operations

AFFINE: Any = operations.channel_affine.default
RELUS = (torch.ops.aten.relu_.default, torch.ops.aten.relu.default)


def fused(steps: Sequence[Step], results: Sequence[Slot]) -> list[Step]:
    """The same steps, with one where a norm is followed by an activation and nobody else reads the norm's result."""
    found: list[Step | None] = list(steps)
    for number, (func, args, kwargs, made) in enumerate(steps):
        if func is not AFFINE or len(args) > 4 or kwargs:
            continue
        users = [
            k for k in range(number + 1, len(steps)) if made in slots_in((steps[k][1], list(steps[k][2].values())))
        ]
        if not users or steps[users[0]][0] not in RELUS:
            continue
        activated = steps[users[0]][3]
        if activated == made or (len(users) == 1 and made not in results):
            found[number], found[users[0]] = (func, (*args, True), kwargs, activated), None
    return [step for step in found if step is not None]
