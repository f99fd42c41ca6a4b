"""Steps of training under a plan, on ranks of one thread each: forward, backward, gradients, the optimizer's step."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.meters import RESET, resident
from harness.results import rounded
from problems import Job, problem

import mural
from mural.comm import Record
from mural.cost import Hardware
from mural.cost.clock import trim
from mural.engine.timing import measured_spans, predicted_timeline
from mural.pipeline.timeline import ActionSpan


def measure(rank: int, path: str, jobs: Sequence[Job], settings: dict[str, Any]) -> None:
    """On a rank: all jobs, one after the other; rank 0 adds a record of each to the file, and says so."""
    for job in jobs:
        gc.collect()
        trim()
        if RESET.exists():
            RESET.write_text("5")
        record = {"kind": "step", **job.about, **measured(rank, job, settings)}
        if rank == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps(rounded(record)) + "\n")
            print(f"{job.name}: {min(record['seconds']):.3g} s a step", flush=True)


def measured(rank: int, job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step, the slowest rank's; losses; every rank's memory, messages and waits in a step."""
    given = problem(job.model, settings["quick"])
    plan = job.division.plan(settings["microbatches"], given.normalized)
    pm = mural.parallelize(given.build(), plan, loss=F.cross_entropy)
    weights = list(pm.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9) if weights else None
    image, labels = given.batch(job.batch)
    steps = [timed(pm, optimizer, image, labels)]  # the first one is not counted
    begin = len(steps)
    while len(steps) == begin or (len(steps) <= settings["rounds"] and spent(steps[begin:]) < settings["seconds"]):
        steps.append(timed(pm, optimizer, image, labels))
    last = steps[-1].record
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (resident("VmHWM"), last.messages, last.bytes, last.waited))
    peaks, messages, sent, waited = zip(*told, strict=True)
    answer = {
        "seconds": [step.seconds for step in steps[begin:]],
        "losses": [step.loss for step in steps],
        "peaks": peaks,
        "messages": messages,
        "bytes": sent,
        "waited": waited,
        "plan": str(plan),
    }
    if job.division.stage > 1 and job.division.data == 1:
        answer |= timelines(rank, pm, image)
    return answer


@dataclass(frozen=True)
class Step:
    """A step: its seconds on the slowest rank, the loss, and what this rank sent and waited for."""

    seconds: float
    loss: float
    record: Record


def spent(steps: Sequence[Step]) -> float:
    """The seconds of some steps, alike on every rank."""
    return sum(step.seconds for step in steps)


def timed(pm: Any, optimizer: Any, image: torch.Tensor, labels: torch.Tensor) -> Step:
    """A step that all ranks begin together, with no garbage to collect."""
    gc.collect()
    gc.disable()
    dist.barrier()
    begin = time.perf_counter()
    with pm.world_mesh.transport.record() as record:
        if optimizer is not None:
            optimizer.zero_grad()
        loss = pm.step(image, labels)
        if optimizer is not None:
            optimizer.step()
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    gc.enable()
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return Step(float(took), float(loss), record)


def timelines(rank: int, pm: Any, image: torch.Tensor) -> dict[str, Any]:
    """When each seat worked in the last step, and when it was to work by the prediction for this machine; on rank 0."""
    found = {"spans": rows(measured_spans(pm))}
    if rank == 0:
        found["predicted_spans"] = rows(predicted_timeline(pm, image, Hardware.here("cpu")).spans)
    return found


def rows(spans: tuple[ActionSpan, ...]) -> list[list[Any]]:
    """Spans as rows: seat, kind, stage, micro-batch, replica, start and end."""
    actions = ((span, span.action) for span in spans)
    return [[s.seat, a.kind, a.stage, a.microbatch, a.replica, s.start, s.end] for s, a in actions]
