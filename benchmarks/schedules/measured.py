"""Steps of training under a plan, on ranks of one thread each: forward, backward, gradients, the optimizer's step."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.counting import over_ranks
from harness.meters import RESET, resident
from problems import Job, problem

import mural
from mural.comm import Record
from mural.cost import Hardware
from mural.cost.clock import trim
from mural.engine.timing import measured_spans, predicted_timeline
from mural.pipeline.timeline import ActionSpan


def clean() -> None:
    """Give free memory back, and count the peak from here."""
    trim()
    if RESET.exists():
        RESET.write_text("5")


def line(record: dict[str, Any]) -> str:
    """A measurement in one line, for the terminal."""
    return f"{record['name']}: {min(record['seconds']):.3g} s a step"


def measured(rank: int, job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step, the slowest rank's; losses; every rank's memory, messages and waits in a step."""
    clean()
    given = problem(job.model, settings["quick"])
    plan = job.division.plan(job.microbatches, given.normalized)
    image, labels = given.batch(job.batch)
    if job.division.apart:
        pm: Any = Apart(given.build())
        image, labels = (part.chunk(job.division.data)[rank] for part in (image, labels))
    else:
        pm = mural.parallelize(given.build(), plan, loss=F.cross_entropy)
    weights = list(pm.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9) if weights else None
    steps = [timed(pm, optimizer, image, labels)]  # the first one is not counted
    begin = len(steps)
    while len(steps) == begin or (len(steps) <= settings["rounds"] and spent(steps[begin:]) < settings["seconds"]):
        steps.append(timed(pm, optimizer, image, labels))
    last = steps[-1].record
    peaks, messages, sent, waited = zip(
        *over_ranks((resident("VmHWM"), last.messages, last.bytes, last.waited)), strict=True
    )
    answer = {
        "seconds": [step.seconds for step in steps[begin:]],
        "losses": [step.loss for step in steps],
        "peaks": peaks,
        "messages": messages,
        "bytes": sent,
        "waited": waited,
        "plan": "none: plain torch" if job.division.apart else str(plan),
    }
    if job.division.stage > 1 and job.division.data == 1:
        answer |= timelines(rank, pm, image)
    return answer


class Apart:
    """A model that each rank trains by itself, in plain torch, called as a parallel one is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.zero_grad, self.parameters = model.zero_grad, model.parameters
        self.world_mesh = mural.init(data=dist.get_world_size())

    def step(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of this rank's images, after forward and backward."""
        loss = F.cross_entropy(self.model(image), labels)
        loss.backward()
        return loss.detach()


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
        pm.zero_grad()
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
        found["predicted_spans"] = rows(predicted_timeline(pm, image, machine()).spans)
    return found


@cache
def machine() -> Hardware:
    """This machine, its rates measured once in a process."""
    return Hardware.here("cpu")


def rows(spans: tuple[ActionSpan, ...]) -> list[list[Any]]:
    """Spans as rows: seat, kind, stage, micro-batch, replica, start and end."""
    actions = ((span, span.action) for span in spans)
    return [[s.seat, a.kind, a.stage, a.microbatch, a.replica, s.start, s.end] for s, a in actions]
