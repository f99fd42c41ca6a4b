"""What SLURM's variables say: whether srun started this process, as which task, and on which machines."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mural.errors import PlanError

NOT_A_STEP = 0xFFFFFFF0
"""Steps from here on are SLURM's own: the batch script, the shell of salloc, what adopts a login."""

SHELLS = ("bash", "sh", "zsh", "tcsh", "csh", "fish", "ksh", "dash")


def expand_nodes(nodes: str) -> tuple[str, ...]:
    """The machines that a node list names, in its order.

    >>> expand_nodes("gpu[001-003,7],login1")
    ('gpu001', 'gpu002', 'gpu003', 'gpu7', 'login1')
    >>> expand_nodes("rack[1-2]n[09-10]-ib")
    ('rack1n09-ib', 'rack1n10-ib', 'rack2n09-ib', 'rack2n10-ib')
    """
    return tuple(name for item in _split(nodes) for name in _expand(item, nodes))


def _split(nodes: str) -> list[str]:
    """The parts of a list between the commas outside of brackets."""
    return [part for part in re.split(r",(?![^\[]*\])", nodes) if part]


def _expand(item: str, nodes: str) -> list[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        if "]" in item:
            raise PlanError(f"the node list {nodes!r} has a ] without a [: set MASTER_ADDR to the machine of rank 0")
        return [item]
    inside, closed, after = rest.partition("]")
    if not closed:
        raise PlanError(f"the node list {nodes!r} has a [ without a ]: set MASTER_ADDR to the machine of rank 0")
    numbers: list[str] = []
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise PlanError(f"{part!r} in the node list {nodes!r} is no number or range: set MASTER_ADDR instead")
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [f"{before}{number}{end}" for number in numbers for end in _expand(after, nodes)]


def expand_counts(counts: str) -> tuple[int, ...]:
    """The tasks on each machine, as SLURM_STEP_TASKS_PER_NODE writes them.

    >>> expand_counts("4(x2),1")
    (4, 4, 1)
    """
    found: list[int] = []
    for part in filter(None, counts.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise PlanError(f"SLURM_STEP_TASKS_PER_NODE={counts!r} is not of the form 4(x2),1: unset it")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def not_a_rank(environ: Mapping[str, str], tasks: int) -> str:
    """Why a process with SLURM's variables is none of srun's tasks; empty if it is one.

    An allocation alone says nothing of this process: its variables are those of the shell of salloc or of the batch
    script, with SLURM_NTASKS as it was asked for, and nobody else runs.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "?"
    fix = "start the program with srun, or with mural's --devices, for more ranks"
    if not step:
        return f"SLURM_JOB_ID={job} is an allocation, but no SLURM_STEP_ID says that srun started this process: {fix}"
    if not step.isdigit() or int(step) >= NOT_A_STEP:
        return f"SLURM_STEP_ID={step} is the shell of an allocation (job {job}), not a step of srun: {fix}"
    shell = environ.get("SLURM_JOB_NAME", "")
    if tasks > 1 and environ.get("SLURM_PTY_PORT") and shell in SHELLS:
        return f"SLURM_PTY_PORT and SLURM_JOB_NAME={shell} mean an interactive shell of srun --pty: {fix}"
    return ""
