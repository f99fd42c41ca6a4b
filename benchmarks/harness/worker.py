"""One rank: a process that imports torch and mural, says so, and then answers commands until its input ends.

Started by `team.py`. Commands come as lines of JSON on standard input; each answer is one line of JSON on what was
standard output, while everything that libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.case import Case
from harness.meters import METERS, Meter
from harness.problem import Problem
from harness.replay import Tape, recording, replaying
from mural.errors import PeerError

MEMORY_WORDS = ("out of memory", "ALLOC_FAILED", "unable to find an engine")
"""What torch, CUDA and cuDNN say when memory was missing."""
WARM = 2
"""Steps before one is recorded: in the second, the costs of exchanges may be measured, by messages of their own."""


class Rank:
    """One rank of a team, after `join`; every public method answers a command."""

    def __init__(self) -> None:
        self.rank, self.ranks = 0, 1
        self.device = torch.device("cpu")
        self.meter: Meter = METERS["cpu"]()
        self.problem: Problem | None = None

    def join(self, rank: int, ranks: int, store: str, device: str, cap: int | None) -> dict[str, Any]:
        """Enter the team's process group, with the cap on memory; what this process runs with."""
        self.rank, self.ranks, self.device = rank, ranks, torch.device(device)
        self.meter = METERS[self.device.type]()
        self.meter.cap(cap)
        if ranks > 1:
            files = dist.FileStore(store, ranks)
            dist.init_process_group("gloo", store=files, rank=rank, world_size=ranks, timeout=timedelta(minutes=10))
        cuda = self.device.type == "cuda"
        return {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "device_memory": torch.cuda.mem_get_info()[1] if cuda else None,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
            "convolutions_in_tf32": torch.backends.cudnn.allow_tf32 if cuda else None,
        }

    def take(self, case: dict[str, Any]) -> Problem:
        """The problem of a case; the last one is kept as long as it is the same."""
        wanted = Case.decode(case)
        if self.problem is None or self.problem.case != wanted:
            self.problem = None
            self.meter.reset()
            self.problem = Problem(wanted, self.device)
        return self.problem

    def together(self, problem: Problem) -> float:
        """Seconds of one step by the clock, all ranks beginning together."""
        if self.ranks > 1:
            dist.barrier()
        begin = time.perf_counter()
        problem.step()
        self.meter.wait()
        return time.perf_counter() - begin

    def measure(self, case: dict[str, Any], repeats: int, budget: float) -> dict[str, Any]:
        """Peaks of memory of the second step, gradients reduced, and the times of some more."""
        problem = self.take(case)
        problem.step()
        problem.reduce()
        self.meter.reset()
        loss = problem.step()
        problem.reduce()
        self.meter.wait()
        if self.ranks > 1:
            dist.barrier()
        found = {**self.meter.peaks(), "loss": float(loss), "replicated": problem.replicated}
        found["messages"] = problem.mesh.transport.describe() if problem.mesh else "plain torch"
        first = self.together(problem) if repeats else 0.0
        more = self.agreed(min(repeats - 1, int((budget - first) / first))) if repeats else 0
        found["seconds"] = [first, *(self.together(problem) for _ in range(more))] if repeats else []
        return found

    def agreed(self, count: int) -> int:
        """The smallest of the ranks' numbers: all must take as many steps."""
        number = torch.tensor([max(0, count)])
        if self.ranks > 1:
            dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return int(number)

    def busy(self, case: dict[str, Any], repeats: int, budget: float) -> dict[str, Any]:
        """Seconds of this rank's own part of the step, each rank in turn alone on the device."""
        problem = self.take(case)
        tape = Tape()
        for _ in range(WARM):
            problem.step()
        with recording(tape):
            recorded = float(problem.step())
        times: list[float] = []
        for turn in range(self.ranks):
            if self.ranks > 1:
                dist.barrier()
            while turn == self.rank and len(times) <= repeats and (len(times) < 2 or sum(times) < budget):
                with replaying(tape):
                    times.append(self.meter.alone(problem.step))
        if self.ranks > 1:
            dist.barrier()
        with replaying(tape):
            loss = float(problem.step())
        return {"seconds": times[1:], "transfers": len(tape.names), "losses": [recorded, loss]}

    def utilisation(self, case: dict[str, Any]) -> dict[str, Any]:
        """Seconds of this rank's own part of the step, alone on the device, and those of its kernels in it.

        What its peers send is served from a recording: waits for messages are not in it.
        """
        problem = self.take(case)
        tape = Tape()
        for _ in range(WARM):
            problem.step()
        with recording(tape):
            problem.step()
        wall: list[float] = []
        kernels = 0.0
        for turn in range(self.ranks):
            if self.ranks > 1:
                dist.barrier()
            for _ in range(4 if turn == self.rank else 0):
                with replaying(tape):
                    wall.append(self.meter.alone(problem.step))
            if turn == self.rank:
                with replaying(tape):
                    kernels = self.meter.computing(problem.step)
        if self.ranks > 1:
            dist.barrier()
        return {"wall": sorted(wall[1:])[1], "kernels": kernels}

    def pairs(self, case: dict[str, Any], count: int) -> dict[str, Any]:
        """Seconds of this rank's part alone, and of plain torch on an image of its piece's extents, alternating."""
        problem = self.take(case)
        tape = Tape()
        for _ in range(WARM):
            problem.step()
        with recording(tape):
            problem.step()
        plain = Problem(replace(problem.case, extents=problem.extents, sharded=False), self.device)
        times: dict[str, list[float]] = {"plain": [], "mural": []}
        computing: dict[str, float] = {}
        steps = {"plain": plain.step, "mural": problem.step}
        for turn in range(self.ranks):
            if self.ranks > 1:
                dist.barrier()
            for index in range(count + 2 if turn == self.rank else 0):
                for name in ("plain", "mural") if index % 2 == 0 else ("mural", "plain"):
                    with replaying(tape):
                        times[name].append(self.meter.alone(steps[name]))
            for name in ("plain", "mural") if turn == self.rank else ():
                with replaying(tape):
                    computing[name] = self.meter.computing(steps[name])
        if self.ranks > 1:
            dist.barrier()
        found: dict[str, Any] = {name: seconds[2:] for name, seconds in times.items()}
        return found | {"computing": computing, "extents": list(problem.extents)}

    def train(self, case: dict[str, Any], steps: int, rate: float) -> dict[str, Any]:
        """The losses of some steps of SGD, and the peaks."""
        problem = self.take(case)
        optimizer = torch.optim.SGD(problem.model.parameters(), lr=rate)
        losses: list[float] = []
        self.meter.reset()
        for _ in range(steps):
            losses.append(float(problem.step()))
            problem.reduce()
            optimizer.step()
        found = {**self.meter.peaks(), "losses": losses}
        self.problem = None  # its parameters have moved
        return found

    def check(self, case: dict[str, Any]) -> dict[str, Any]:
        """The largest relative difference from one process, of the loss and of every gradient, in float64."""
        wanted = Case.decode(case)
        problem = Problem(wanted, self.device, torch.float64, dropout=False)
        loss = float(problem.step())
        problem.reduce()
        found = 0.0
        if self.rank == 0:
            whole = Problem(replace(wanted, sharded=False), self.device, torch.float64, dropout=False)
            expected = float(whole.step())
            largest = max(float(p.grad.abs().max()) for p in whole.model.parameters())
            both = zip(problem.model.parameters(), whole.model.parameters(), strict=True)
            found = max(
                abs(loss - expected) / abs(expected),
                *(float((a.grad - b.grad).abs().max()) / largest for a, b in both),
            )
        if self.ranks > 1:
            dist.barrier()
        return {"difference": found, "loss": loss, "grid": list(problem.mesh.spatial) if problem.mesh else []}


def error_of(error: BaseException) -> dict[str, str]:
    """An error as an answer: memory that was missing, a peer that failed, or anything else.

    Of a local rank that raised, its last line tells what; of others, the first.
    """
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[-1 if lines[0].endswith('raised:') else 0]}"
    missing = isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in MEMORY_WORDS)
    kind = "memory" if missing else "peer" if isinstance(error, PeerError) else "error"
    return {"error": kind, "message": text}


def commands() -> Iterator[str]:
    """The lines of the input. Its end ends this process, whatever it is doing: whoever asked is gone."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield lines.get()


def serve(rank: Rank) -> None:
    """Answer commands until the input ends."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write(json.dumps({"value": "ready"}) + "\n")
    for line in commands():
        command = json.loads(line)
        try:
            answer = {"value": getattr(rank, command.pop("do"))(**command)}
        except Exception as error:
            sys.excepthook(*sys.exc_info())
            answer = error_of(error)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    serve(Rank())
