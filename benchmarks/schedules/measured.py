"""Steps of training under a plan, on ranks of one thread each: forward, backward, gradients, the optimizer's step."""

from __future__ import annotations

import gc
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import Division, problem

import mural
from mural.cost import Hardware
from mural.engine.timing import measured_spans, predicted_timeline
from mural.pipeline.timeline import Span

WARMUP = 1


def measure(rank: int, folder: str, name: str, division: Division, settings: dict[str, Any]) -> None:
    """On a rank: seconds of each step, the slowest rank's; the first loss, and every rank's memory; rank 0 writes."""
    given = problem(name, settings["quick"])
    plan = division.plan(settings["microbatches"], given.normalized)
    pm = mural.parallelize(given.build(), plan, loss=F.cross_entropy)
    weights = list(pm.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9) if weights else None
    image, labels = given.batch(settings["batch"])
    seconds: list[float] = []
    losses: list[float] = []
    for number in range(WARMUP + settings["rounds"]):
        took, loss = timed(pm, optimizer, image, labels)
        losses.append(loss)
        if number >= WARMUP:
            seconds.append(took)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    answer = {"seconds": seconds, "losses": losses, "peaks": peaks, "plan": str(plan)}
    if division.stage > 1 and division.data == 1:
        answer |= timelines(rank, pm, image)
    if rank == 0:
        (Path(folder) / "measured.json").write_text(json.dumps(answer))


def timed(pm: Any, optimizer: Any, image: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Seconds of a step on the slowest rank, and its loss; all begin together, with no garbage to collect."""
    gc.collect()
    gc.disable()
    dist.barrier()
    begin = time.perf_counter()
    if optimizer is not None:
        optimizer.zero_grad()
    loss = pm.step(image, labels)
    if optimizer is not None:
        optimizer.step()
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    gc.enable()
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took), float(loss)


def timelines(rank: int, pm: Any, image: torch.Tensor) -> dict[str, Any]:
    """When each seat worked in the last step, and when it was to work by the prediction for this machine; on rank 0."""
    found = {"spans": rows(measured_spans(pm))}
    if rank == 0:
        found["predicted_spans"] = rows(predicted_timeline(pm, image, Hardware.here("cpu")).spans)
    return found


def rows(spans: tuple[Span, ...]) -> list[list[Any]]:
    """Spans as rows: seat, kind, stage, micro-batch, replica, start and end."""
    actions = ((span, span.action) for span in spans)
    return [[s.seat, a.kind, a.stage, a.microbatch, a.replica, s.start, s.end] for s, a in actions]
