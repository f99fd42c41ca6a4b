"""A U-Net in stages with 16 GiB each, with and without offload: the document's aim, fewer devices for the same model.

Ranks share one GPU, each under its cap. Four images go through in micro-batches of one, under 1F1B or GEMS.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.nn import functional as F

import mural
from mural.models import UNet
from mural.ranks import run_local
from offload.parts import Part
from offload.settings import Settings

IMAGES, DROPPED = 4, 3
"""Images of a step, and steps that do not count: mural notes and times what they do."""
TOY_WIDTH, WIDTH, TOY_SIZE = 4, 64, 32


def measured(part: Part, device: torch.device, settings: Settings) -> dict[str, Any]:
    """Seconds of steps, the largest peak of all ranks, the loss, and what moved on the rank that moved most."""
    return run_local(train, part.stages, part, settings, device=device.type)


def plan_of(part: Part, toy: bool) -> mural.Plan:
    """The plan of a part; images of a step are micro-batches."""
    schedule: Any = "gems" if part.gems else "1f1b" if part.stages > 1 else "sequential"
    memory = "" if not part.offloads else "200KB" if toy else f"{part.cap}GiB"
    return mural.Plan(
        stage=part.stages, schedule=schedule, microbatches=IMAGES, replications=2 if part.gems else 1,
        offload=("activations", "optimizer") if part.offloads else (), memory=memory, batchnorm="micro",
        precision="float32" if toy else "bfloat16",
    )  # fmt: skip


def train(rank: int, part: Part, settings: Settings) -> dict[str, Any] | None:
    """The record, on rank 0."""
    cuda = torch.cuda.is_available() and not settings.toy
    device = torch.device("cuda:0" if cuda else "cpu")
    if cuda and part.cap is not None:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(part.cap * 2**30 / whole, device)
    torch.manual_seed(0)
    model = UNet(width=TOY_WIDTH if settings.toy else WIDTH, depth=2 if settings.toy else 4).to(device)
    size = TOY_SIZE if settings.toy else int(part.subject)
    pm = mural.parallelize(model, plan_of(part, settings.toy), loss=F.cross_entropy, image=(3, size, size))
    optimizer = torch.optim.SGD(pm.parameters(), 0.0, momentum=0.9)
    draws = torch.Generator().manual_seed(1)
    image = torch.randn(IMAGES, 3, size, size, generator=draws).to(device)
    target = torch.randint(0, 2, (IMAGES, size, size), generator=draws).to(device)
    seconds: list[float] = []
    losses: list[float] = []
    for turn in range(settings.repeats + DROPPED):
        if turn == DROPPED and cuda:
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        losses.append(float(pm.step(image, target)))
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    moved = pm.offloading.memory.moved if pm.offloading is not None else [0, 0]
    peaks = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)] if cuda else [0, 0]
    mesh = pm.world_mesh
    found = mural.comm.stack(torch.tensor([*peaks, *moved]), mesh.everyone, mesh.rank, mesh.transport, "peaks")
    allocated, reserved, out, back = found.amax(0).tolist()
    record = {
        "allocated": allocated, "reserved": reserved, "seconds": seconds[DROPPED:], "losses": losses,
        "report": {"to_host": out, "from_host": back}, "step": statistics.median(seconds[DROPPED:]),
    }  # fmt: skip
    return record if rank == 0 else None
