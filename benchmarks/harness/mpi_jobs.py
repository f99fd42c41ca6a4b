"""Jobs over MPI: the ranks of one mpirun measure jobs, and rank 0 writes what each found as soon as it is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mural
from harness.counting import over_ranks
from harness.results import Log, Record, scrubbed
from mural.ranks.join import placement


def join() -> int:
    """The number of ranks, after this one has joined them; one thread a rank."""
    torch.set_num_threads(1)
    mural.init(data=placement().world, backend="mpi")
    return dist.get_world_size()


def measure(
    script: str,
    output: Path,
    jobs: Sequence[Any],
    minutes: float,
    device: str,
    line: Callable[[Record], str],
    part: str = "",
) -> None:
    """Measure jobs for all ranks that joined, until the time is up; what the file has is not measured again."""
    load, log, run = os.getloadavg()[0], None, ""
    if dist.get_rank() == 0:
        given = scrubbed(" ".join(sys.argv[1:]))
        log = Log("", output, [], minutes, f"mpirun -n {dist.get_world_size()} python {script} {given}")
        run = log.records[-1]["date"]
        log.write("versions", name=run, torch=torch.__version__, device=device, load=load)
    done = {record.get("name") for record in log.records} if log else set()
    for job in jobs:
        if not over_ranks(log is not None and log.left > 0 and job.name not in done)[0]:
            continue
        kind = {"kind": type(job).__name__.lower(), "name": job.name, **vars(job)} | ({"part": part} if part else {})
        record = kind | {"run": run} | job.measure()
        if log is not None:
            log.write(**record)
            log.say(line(record))
