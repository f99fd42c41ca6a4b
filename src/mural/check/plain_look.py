"""A first look at a small case on one device: whether it runs, agrees with itself, and learns from every parameter."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from mural.check.compared_case import Case
from mural.check.copies import copied
from mural.check.leaves import gap, largest
from mural.check.plain_run import PlainModel
from mural.check.rounding import At, left_behind
from mural.check.updates import steps
from mural.shard.generators import generators_kept

OWN = {torch.float64: 1e-6, torch.float32: 1e-2}
"""How far two runs of one device may be apart, relative to the largest entry of the kind."""


@dataclass(frozen=True)
class PlainLook:
    """What two runs of one step on one device show."""

    why: str = ""
    """Why nothing can be proved with this case; empty if it can."""
    still: tuple[str, ...] = ()
    """The parameters that have no gradient, or one of zeros."""
    seconds: float = 0.0
    """How long a step takes."""


def first_look(case: Case, dtype: torch.dtype, device: torch.device) -> PlainLook:
    """What one device does with a case, twice; raises what the model raises."""
    runs = list[dict[At, Any]]()
    begin = time.perf_counter()
    for _ in range(2):
        begin = time.perf_counter()
        with generators_kept(device):
            model, loss = copied(case.model, case.loss)
            runs.append(left_behind(steps(PlainModel(model, case.plan, loss), case.image, case.target, 1, 0.0)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    seconds, (one, other) = time.perf_counter() - begin, runs
    loss_value = float(one[0, ("loss", "")])
    if not isfinite(loss_value):
        return PlainLook(f"the loss of the small case is {loss_value} on one device, too")
    scales: dict[str, float] = {}
    for (_, (kind, _)), value in one.items():
        scales[kind] = max(scales.get(kind, 0.0), largest(value))
    for at, value in one.items():
        kind, name = at[1]
        apart = gap(other[at], value) if at in other else None
        if apart is None or apart.size > OWN.get(dtype, 1e-1) * (scales[kind] or 1.0):
            return PlainLook(f"one device differs from itself from run to run ({kind} {name})".replace(" )", ")"))
    gradients = {name: value for (_, (kind, name)), value in one.items() if kind == "gradient"}
    still = tuple(name for name, value in gradients.items() if value is None or not bool(value.any()))
    trained = {name for name, p in case.model.named_parameters() if p.requires_grad}
    if gradients and not any(name not in still for name in gradients):
        return PlainLook("no parameter has a gradient in the small case")
    return PlainLook("", tuple(name for name in still if name in trained), seconds)
