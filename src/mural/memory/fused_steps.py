"""Steps of a tape that one kernel does: a norm and the activation after it, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mural.memory.tape import Slot, Step, slots_in
from mural.shard.ops.norm.channel_kernels import operations

AFFINE: Any = operations.channel_affine.default
GRADIENTS: Any = operations.channel_gradients.default
BACK: Any = torch.ops.aten.threshold_backward.default
RELUS = (torch.ops.aten.relu_.default, torch.ops.aten.relu.default)


def fused(steps: Sequence[Step], results: Sequence[Slot]) -> list[Step]:
    """The same steps, with one where a norm and an activation follow each other and nobody reads what is between."""
    return backward_fused(forward_fused(steps, results), results)


def forward_fused(steps: Sequence[Step], results: Sequence[Slot]) -> list[Step]:
    """One step where a norm is followed by an activation."""
    found: list[Step | None] = list(steps)
    for number, (func, args, kwargs, made) in enumerate(steps):
        if func is not AFFINE or len(args) > 4 or kwargs:
            continue
        users = users_of(made, steps, number)
        if not users or steps[users[0]][0] not in RELUS:
            continue
        activated = steps[users[0]][3]
        if activated == made or (len(users) == 1 and made not in results):
            found[number], found[users[0]] = (func, (*args, True), kwargs, activated), None
    return [step for step in found if step is not None]


def backward_fused(steps: Sequence[Step], results: Sequence[Slot]) -> list[Step]:
    """One step where the gradient of an activation goes to the norm before it alone."""
    normed = {step[3]: step[1][0] for step in steps if step[0] is AFFINE and step[1][4:] == (True,)}
    found: list[Step | None] = list(steps)
    for number, (func, args, _, made) in enumerate(steps):
        if func is not BACK or args[1] not in normed or args[2] != 0 or made in results:
            continue
        users = users_of(made, steps, number)
        if len(users) != 1:
            continue
        after, theirs, kwargs, gives = steps[users[0]]
        if after is GRADIENTS and theirs[:2] == (made, normed[args[1]]) and len(theirs) == 4:
            found[number], found[users[0]] = None, (after, (args[0], *theirs[1:], args[1]), kwargs, gives)
    return [step for step in found if step is not None]


def users_of(made: Any, steps: Sequence[Step], number: int) -> list[int]:
    """The steps after one that read what it made."""
    return [k for k in range(number + 1, len(steps)) if made in slots_in((steps[k][1], list(steps[k][2].values())))]
