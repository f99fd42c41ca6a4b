"""Adam on a stack of wide layers: weights, gradients and what Adam keeps need 24 GiB, and the cap is 16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from one_gpu.rank import Alone, host_peaks
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from offload.copies import seconds
from offload.parts import Part
from offload.settings import Settings

LAYERS, WIDTH, BATCH = 24, 8192, 512
TOY_LAYERS, TOY_WIDTH, TOY_BATCH = 3, 64, 8
TOY_MEMORY = "120KiB"
RATE = 1e-5
DROPPED = 3
"""Steps whose times do not count: mural notes and times what they do."""


def stack(device: torch.device, toy: bool) -> nn.Module:
    """Linear layers with GELU between, whose values keep their size."""
    torch.manual_seed(0)
    width = TOY_WIDTH if toy else WIDTH
    layers = [nn.Linear(width, width, device=device) for _ in range(TOY_LAYERS if toy else LAYERS)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.GELU())))[:-1]


def plain_step(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward and backward of plain torch."""

    def step(values: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(model(values), target)
        loss.backward()
        return loss.detach()

    return step


def measured(part: Part, rank: Alone, settings: Settings) -> dict[str, Any]:
    """Seconds of steps and of updates, peaks of all of them, and the losses."""
    device, toy = rank.device, settings.toy
    model = stack(device, toy)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    pm = None
    if part.way == "mural":
        plan = mural.Plan(offload=("optimizer",), memory=TOY_MEMORY if toy else f"{part.cap}GiB")
        pm = mural.parallelize(model, plan, loss=F.mse_loss)
    step = plain_step(model) if pm is None else pm.step
    base = rank.begin_counting()
    losses: list[float] = []
    steps: list[float] = []
    updates: list[float] = []
    shape = (TOY_BATCH, TOY_WIDTH) if toy else (BATCH, WIDTH)
    for turn in range(settings.repeats + DROPPED):
        draws = torch.Generator(device).manual_seed(turn)
        values, target = (torch.randn(shape, generator=draws, device=device) for _ in range(2))
        optimizer.zero_grad()
        steps.append(seconds(lambda: losses.append(float(step(values, target))), device))  # noqa: B023 (called here)
        updates.append(seconds(optimizer.step, device))
    return {
        **rank.meter.peaks(),
        **host_peaks(base),
        "steps": steps[DROPPED:],
        "updates": updates[DROPPED:],
        "first": [steps[:DROPPED], updates[:DROPPED]],
        "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "resting": on_host(optimizer),
        "report": {} if pm is None or pm.offloading is None else pm.offloading.report(),
    }


def on_host(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what an optimizer keeps on the host; counters of steps are not in it."""
    kept = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(value.nbytes for value in kept if value.ndim and value.device.type == "cpu")
