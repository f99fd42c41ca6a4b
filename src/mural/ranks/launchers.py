"""What the variables of each launcher say of this process, launcher by launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mural.comm.hosts import LOCAL_STORE
from mural.errors import PlanError

# -- SLURM's lists of nodes and counts ---------------------------------------------------------------------------------


NOT_A_STEP = 0xFFFFFFF0
"""Step numbers from here on are SLURM's own: the batch script, the shell of salloc, an adopted login."""

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
            raise PlanError(f"{part!r} in the node list {nodes!r} is not a number or range: set MASTER_ADDR instead")
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
    """Why a process with SLURM's variables is not one of srun's tasks; empty if it is.

    An allocation alone says nothing about this process: its variables are those of the shell of salloc or of the batch
    script, with SLURM_NTASKS as requested, and no other process runs.
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


# -- launchers ---------------------------------------------------------------------------------------------------------


TORCHRUN = "TORCHELASTIC_RUN_ID"
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")


@dataclass(frozen=True)
class Claim:
    """What one launcher says about this process; None where it says nothing. `job` is the same on all ranks."""

    launcher: str
    rank: int
    world: int
    words: str
    local_rank: int | None = None
    local_world: int | None = None
    node: int | None = None
    address: str | None = None
    job: str = ""


@dataclass(frozen=True)
class Family:
    """The variables of a kind of MPI; where several are named, the first that is set counts."""

    launcher: str
    rank: str
    world: str
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]
    job: tuple[str, ...]


FAMILIES = (
    Family(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Family(
        "mpirun (MVAPICH)",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        ("MPIRUN_ID",),
    ),
    Family(
        "mpiexec (MPICH, Intel MPI)",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("PMI_JOBID", "PALS_APID"),
    ),
)


def claims(environ: Mapping[str, str], notes: list[str]) -> list[Claim]:
    """The claims of all launchers whose variables are set, innermost first; `notes` collects what was ignored."""
    found = [_mural(environ), _torch(environ), *(_mpi(environ, family) for family in FAMILIES), _srun(environ, notes)]
    return [claim for claim in found if claim is not None]


def _mural(environ: Mapping[str, str]) -> Claim | None:
    """The claim of a rank that `run_local` started; None if torchrun was started inside one."""
    if LOCAL_STORE not in environ or TORCHRUN in environ:
        return None
    rank, world = pair(environ, "RANK", "WORLD_SIZE")
    return Claim("mural", rank, world, f"mural started {world} local ranks, of which this is {rank}", rank, world, 0)


def _torch(environ: Mapping[str, str]) -> Claim | None:
    """The variables of torchrun, or the same set by hand, which torch documents for any launcher."""
    if "RANK" not in environ or (LOCAL_STORE in environ and TORCHRUN not in environ):
        return None
    rank, world = pair(environ, "RANK", "WORLD_SIZE")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if world > 1 and missing:
        raise PlanError(
            f"RANK={rank} and WORLD_SIZE={world} are set, but {' and '.join(missing)} not: set them to the machine of "
            "rank 0 and a free port there, or start the program with torchrun"
        )
    launcher = "torchrun" if TORCHRUN in environ else "environment"
    return Claim(
        launcher,
        rank,
        world,
        f"{launcher}: RANK={rank}, WORLD_SIZE={world}",
        number(environ, "LOCAL_RANK"),
        number(environ, "LOCAL_WORLD_SIZE"),
        number(environ, "GROUP_RANK"),
        environ.get("MASTER_ADDR"),
    )


def _mpi(environ: Mapping[str, str], family: Family) -> Claim | None:
    if family.rank not in environ and family.world not in environ:
        return None
    rank, world = pair(environ, family.rank, family.world)
    locals_, sizes = (
        next((number(environ, name) for name in names if name in environ), None)
        for names in (family.local_rank, family.local_world)
    )
    job = next((environ[name] for name in family.job if name in environ), "")
    words = f"{family.launcher}: {family.rank}={rank}, {family.world}={world}"
    return Claim(family.launcher, rank, world, words, locals_, sizes, job=job)


def _srun(environ: Mapping[str, str], notes: list[str]) -> Claim | None:
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if job is None:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world = number(environ, size) or 1
    refused = not_a_rank(environ, world)
    if refused:
        if number(environ, "SLURM_PROCID"):
            raise PlanError(
                f"SLURM_PROCID={environ['SLURM_PROCID']}, so srun started this process among others, but {refused}. "
                "Keep all of SLURM's variables where a container or a script removes some"
            )
        notes.append(f"ignored: {refused}")
        return None
    rank, world = pair(environ, "SLURM_PROCID", size)
    node = number(environ, "SLURM_NODEID")
    nodes = next((environ[name] for name in NODE_LISTS if name in environ), "")
    names = expand_nodes(nodes)
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    evenly = -(-world // max(1, len(names)))
    step = environ.get("SLURM_STEP_ID") or environ["SLURM_STEPID"]
    return Claim(
        "srun",
        rank,
        world,
        f"srun: SLURM_PROCID={rank}, {size}={world} in step {step} of job {job}",
        number(environ, "SLURM_LOCALID"),
        counts[node] if node is not None and node < len(counts) else evenly,
        node,
        names[0] if len(names) > 1 else None,
        f"{job}.{step}",
    )


def number(environ: Mapping[str, str], name: str) -> int | None:
    """The whole number that a variable holds; None if it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise PlanError(f"{name}={text!r} is not a whole number of at least 0: correct it, or unset it")
    return int(text)


def pair(environ: Mapping[str, str], rank: str, world: str) -> tuple[int, int]:
    """Rank and number of ranks, from two variables that must both be set."""
    found, size = number(environ, rank), number(environ, world)
    if found is None or size is None:
        here, missing = (world, rank) if found is None else (rank, world)
        raise PlanError(f"{here}={environ[here]} is set, but {missing} is not: set both, or unset {here}")
    if found >= size:
        raise PlanError(f"{rank}={found}, but {world}={size}: ranks are numbered from 0 to {world} − 1; correct one")
    return found, size
