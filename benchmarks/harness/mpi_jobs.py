"""Jobs over MPI: an mpirun, whose ranks measure jobs, and rank 0 writes what each found as soon as it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mural
from harness.counting import over_ranks
from harness.results import Log, Record, scrubbed
from mural.comm.mpi import available
from mural.comm.mpi.installation import LAUNCHER_PREFIXES
from mural.errors import PlanError
from mural.ranks.join import placement

STARTERS = ("OMPI_MCA_plm_", "PRTE_MCA_plm_")
"""Variables by which Open MPI is told how to start ranks: a machine without ssh needs one."""


def mpirun() -> str | None:
    """The mpirun next to this Python, or the system's."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def is_kept(name: str) -> bool:
    """Whether a new mpirun sees a variable: not what a launcher told this process, but how the user has ranks started.

    >>> is_kept("PATH"), is_kept("OMPI_COMM_WORLD_RANK"), is_kept("OMPI_MCA_plm_rsh_agent")
    (True, False, True)
    """
    return name.startswith(STARTERS) or not name.startswith(LAUNCHER_PREFIXES)


def launch(ranks: int, script: Path, *given: str, options: Sequence[str] = (), limit: float = 600.0) -> None:
    """Run a script on the ranks of a new mpirun until its end; PlanError where it fails, or takes longer."""
    program = mpirun()
    if missing := available() or ("" if program else "there is no mpirun"):
        raise PlanError(f"this needs MPI: {missing}")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    many = ["--oversubscribe", "--bind-to", "none"]
    inherited = {name: value for name, value in os.environ.items() if is_kept(name)}
    command = [str(program), "-n", str(ranks), *root, *many, *options, sys.executable, str(script), *given]
    with subprocess.Popen(command, env=inherited | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired as error:
            process.terminate()  # it ends its ranks
            raise PlanError(f"{script.name} on {ranks} ranks did not end in {limit:.0f} s") from error
    if code:
        raise PlanError(f"{script.name} on {ranks} ranks ended with exit code {code}")


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
    options: Sequence[str] = (),
) -> None:
    """Measure jobs for all ranks that joined, until the time is up; what the file has is not measured again.

    `options` are those that mpirun was started with, for the record.
    """
    load, log, run = os.getloadavg()[0], None, ""
    if dist.get_rank() == 0:
        ranks, given = str(dist.get_world_size()), scrubbed(" ".join(sys.argv[1:]))
        log = Log("", output, [], minutes, " ".join(["mpirun", "-n", ranks, *options, "python", script, given]))
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
