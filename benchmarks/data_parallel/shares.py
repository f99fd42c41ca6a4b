"""Where the time of a rank goes: computing, communicating, or waiting for a rank that is not there yet.

All ranks run on one machine and read one clock. A rank that waits for an exchange is *idle* until every rank of the
exchange has begun it, and *communicates* from then on; the rest of its step it *computes*. What travels while a rank
computes costs it nothing, and is counted apart, as hidden.

    rank 0   ▒▒▒▒ computes ▒▒▒▒|·· idle ··|── communicates ──|
    rank 1   ▒▒▒▒▒▒▒▒▒ computes ▒▒▒▒▒▒▒▒▒▒|── communicates ──|
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import problem
from torch import Tensor

import mural
from mural.comm import Transport
from mural.gradients import Reducer

WARMUP = 3


@dataclass
class Wait:
    """A stretch in which a rank waited for an exchange that it had begun before."""

    key: str
    begun: float
    begin: float
    end: float


@dataclass
class Trace:
    """One step of one rank."""

    begin: float = 0.0
    end: float = 0.0
    waits: list[Wait] = field(default_factory=list[Wait])
    hidden: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


@contextlib.contextmanager
def tracing(transport: Transport, trace: Trace) -> Iterator[None]:
    """Note every wait for messages, and for the means of gradients, inside the block."""
    original = transport.wait
    first = transport.serial

    def wait(transfer: Any) -> None:
        begin = time.perf_counter()
        original(transfer)
        key = f"message {transfer.serial - first}"
        trace.waits.append(Wait(key, transfer.posted, begin, time.perf_counter()))

    # Instead of a hook that every wait of every program would ask for: the one transport of this process.
    transport.wait = wait  # type: ignore[method-assign]
    try:
        with transport.record() as record:
            trace.begin = time.perf_counter()
            yield
            trace.end = time.perf_counter()
            time.sleep(0.05)  # the threads that note the end of a bucket may be a moment behind
    finally:
        del transport.wait  # type: ignore[method-assign]
    launched = sorted(record.spans("bucket"))
    trace.hidden = launched
    for begin, end in record.spans("bucket wait"):
        trace.waits.append(Wait("buckets", launched[-1][0] if launched else begin, begin, end))


def measure(
    rank: int, folder: str, name: str, data: int, spatial: int, overlap: bool, rounds: int, quick: bool
) -> None:
    """On a rank: its traces of several steps, written to a file of its own."""
    mesh = mural.init(data=data, spatial=(spatial, 1) if spatial > 1 else None)
    step = problem_step(name, mesh, overlap, quick)
    traces: list[Trace] = []
    for number in range(WARMUP + rounds):
        trace = Trace()
        gc.collect()
        dist.barrier()
        with tracing(mesh.transport, trace):
            step(trace)
        if number >= WARMUP:
            traces.append(trace)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps([asdict(t) for t in traces]))


def problem_step(name: str, mesh: mural.Mesh, overlap: bool, quick: bool) -> Any:
    """The step of a problem on a mesh, with exact batch norm; the batch grows with the data axis."""
    given = problem(name, quick)
    model = given.build("cpu")
    reducer = Reducer(model, mesh) if overlap else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pieces = [given.piece(i, "cpu") for i in range(mesh.size("data"))]
    image, labels = (torch.cat(parts) for parts in zip(*pieces, strict=True))

    def step(trace: Trace) -> Tensor:
        optimizer.zero_grad()
        dims = (1, 2)[: len(mesh.spatial)] if given.per_pixel else ()
        loss = F.cross_entropy(model(mural.shard(image, mesh)), mural.shard(labels, mesh, dims=dims))
        if reducer is None:
            loss.backward()
            begin = time.perf_counter()
            mural.reduce_gradients(model, mesh)
            trace.waits.append(Wait("reduce_gradients", begin, begin, time.perf_counter()))
        else:
            with reducer.watching():
                loss.backward()
        optimizer.step()
        return loss

    return step


def shares(ranks: list[list[dict[str, Any]]]) -> list[dict[str, float]]:
    """Seconds of each rank's step, the mean over the steps: in all, computing, communicating, idle, and hidden.

    >>> a = {"key": "m", "begun": 1.0, "begin": 2.0, "end": 6.0}
    >>> b = {"key": "m", "begun": 5.0, "begin": 5.0, "end": 6.0}
    >>> step = {"begin": 0.0, "end": 10.0, "hidden": []}
    >>> found = shares([[step | {"waits": [a]}], [step | {"waits": [b]}]])
    >>> [(rank["compute"], rank["communication"], rank["idle"]) for rank in found]
    [(6.0, 1.0, 3.0), (9.0, 1.0, 0.0)]
    """
    found: list[dict[str, float]] = []
    count = len(ranks[0])
    for mine in ranks:
        total = dict.fromkeys(("step", "compute", "communication", "idle", "hidden"), 0.0)
        for number, trace in enumerate(mine):
            for key, seconds in split(trace, [other[number] for other in ranks]).items():
                total[key] += seconds / count
        found.append(total)
    return found


def split(trace: dict[str, Any], peers: list[dict[str, Any]]) -> dict[str, float]:
    """One step of one rank, by what it spent its time on."""
    begun: dict[str, float] = {}
    for peer in peers:
        for wait in peer["waits"]:
            begun[wait["key"]] = max(begun.get(wait["key"], 0.0), wait["begun"])
    waited = sum(w["end"] - w["begin"] for w in trace["waits"])
    idle = sum(max(0.0, min(w["end"], begun[w["key"]]) - w["begin"]) for w in trace["waits"])
    step = trace["end"] - trace["begin"]
    last = [w["begin"] for w in trace["waits"] if w["key"] == "buckets"]
    hidden = union([(a, min(b, last[0])) for a, b in trace["hidden"]]) if last else 0.0
    return {
        "step": step,
        "compute": step - waited,
        "communication": waited - idle,
        "idle": idle,
        "hidden": hidden,
    }


def union(spans: list[tuple[float, float]]) -> float:
    """The length that spans cover together.

    >>> union([(0.0, 2.0), (1.0, 3.0), (5.0, 4.0)])
    3.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
