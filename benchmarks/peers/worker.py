"""One rank of one variant: a process that does a step whenever the coordinator asks, and waits idle between.

Started by `processes.py` as `worker.py JOB`. Commands come as lines on standard input; each answer is a line of JSON
on what was standard output, while everything that libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from importlib.metadata import version as package_version
from typing import Any

import exchange
import steps
import torch
import torch.distributed as dist
import variants
from job import Job
from torch.distributed import rpc

PACKAGES = {"mural": "mural", "shardtensor": "nvidia-physicsnemo"}


def peak() -> int:
    """Peak resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Worker:
    """The variant of one job, opened: what answers the commands."""

    def __init__(self, job: Job) -> None:
        self.job = job
        load = exchange.LOADERS.get(job.variant) or variants.LOADERS[job.variant]
        opener: Any = load()
        self.imports = peak()
        if job.ranks > 1:
            dist.init_process_group(
                "gloo", store=dist.FileStore(job.store, job.ranks), rank=job.rank, world_size=job.ranks
            )
        self.opened: Any = opener(job)
        self.step: Any = None

    def hello(self) -> dict[str, Any]:
        """What this process runs with."""
        versions = {"torch": torch.__version__, "package": package_version(PACKAGES.get(self.job.variant, "torch"))}
        return {"versions": versions, "threads": torch.get_num_threads(), "mural": "mural" in sys.modules}

    def check(self) -> dict[str, Any]:
        """The errors of the result in float64."""
        return steps.check(self.job, self.opened)

    def time(self) -> dict[str, Any]:
        """The times of one step."""
        if self.step is None:
            is_burst = isinstance(self.opened, exchange.Burst)
            self.step = self.opened if is_burst else steps.Step(self.job, self.opened)
        return self.step()

    def memory(self) -> dict[str, int]:
        """Peak memory above the imports, and of the imports, in bytes."""
        return {"above": peak() - self.imports, "imports": self.imports}

    def close(self) -> None:
        """Leave the groups."""
        if self.job.variant == "rpc":
            rpc.shutdown()
        if self.job.ranks > 1:
            dist.destroy_process_group()


def serve(job: Job) -> None:
    """Answer commands until the input ends."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(job)
    for line in sys.stdin:
        command = line.strip()
        if command == "end":
            worker.close()
            break
        answers.write(json.dumps(getattr(worker, command)()) + "\n")


if __name__ == "__main__":
    serve(Job.decode(sys.argv[1]))
