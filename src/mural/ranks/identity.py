"""Which rank of which run this process is, read from the variables that launchers set, and why.

`resolve` is a pure function. Each launcher's variables make a claim, and the innermost launcher's claim counts, since
it was started last: srun starts mpirun's daemons or torchrun, not the other way round.

    srun  ⊃  mpirun  ⊃  torchrun, or RANK and WORLD_SIZE  ⊃  mural's own local ranks
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mural.errors import PlanError
from mural.ranks.launchers import Claim, claims, number

LOOPBACK = "127.0.0.1"
HERE = (LOOPBACK, "localhost", "::1")

FIRST_PORT, PORTS, TORCH_PORT = 15000, 16000, 29500
"""The range of a run's port: below the ports that Linux gives to outgoing connections."""


@dataclass(frozen=True)
class Placement:
    """The place of a process among the ranks of a run, and how the ranks meet.

    `node` numbers the machines; `address` and `port` are rank 0's. They are None if no variable tells.
    `why` holds sentences: which variables led here, and which were ignored for what reason.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: int | None = 0
    address: str | None = None
    port: int | None = None
    launcher: str = "single"
    why: tuple[str, ...] = ()

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are known to run on one machine; a guessed number of local ranks does not count."""
        local = self.address is None or self.address in HERE
        return self.local_world == self.world and (local or self.launcher != "environment")

    def __str__(self) -> str:
        if self.world == 1:
            return f"one process ({self.launcher})"
        meet = f"; rank 0 at {self.address}:{self.port}" if self.address is not None else ""
        place = f"rank {self.rank} of {self.world}, local rank {self.local_rank} of {self.local_world}"
        return f"{place} ({self.launcher}{meet})"


def resolve(environ: Mapping[str, str]) -> Placement:
    """This process's rank, world, local rank, machine and meeting point, from the variables of its launcher.

    Variables that are incomplete, are not numbers or contradict each other raise `PlanError`.

    >>> resolve({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).rank
    1
    >>> resolve({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}).world  # an allocation without a step
    1
    """
    environ = {name: value.strip() for name, value in environ.items() if value.strip()}
    notes: list[str] = []
    found = claims(environ, notes)
    _check_rest(environ, found, notes)
    if not found:
        return Placement(why=("no launcher's variables name a rank: one process", *notes))
    first, *others = found
    for other in others:
        first = _with(first, other, notes)
    return _placed(first, environ, notes)


def _check_rest(environ: Mapping[str, str], found: list[Claim], notes: list[str]) -> None:
    """Raise for variables that no claim accounts for but that a rank of a larger run would have."""
    world = number(environ, "WORLD_SIZE")
    if world is not None and "RANK" not in environ:
        if not found and world > 1:
            raise PlanError(f"WORLD_SIZE={world} is set, but RANK is not: set both, or unset WORLD_SIZE")
        if found and found[0].world != world:
            raise PlanError(f"WORLD_SIZE={world}, but {found[0].words}: unset WORLD_SIZE, or start {world} ranks")
        notes.append(f"WORLD_SIZE={world} says the same, without a RANK")
    space = environ.get("PMIX_NAMESPACE", "")
    if not found and number(environ, "PMIX_RANK") is not None and not space.startswith("slurm.pmix"):
        raise PlanError(
            f"PMIX_RANK={environ['PMIX_RANK']} is set, but no variable says of how many ranks: "
            "start the program with mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )


def _with(claim: Claim, other: Claim, notes: list[str]) -> Claim:
    """The claim that overrules another; what it leaves open comes from the other if both mean the same rank."""
    if claim.launcher == "environment" and other.world == claim.world and other.rank != claim.rank:
        raise PlanError(
            f"{claim.words}, but {other.words}: both speak of {claim.world} ranks. RANK was probably set once, outside "
            f"of {other.launcher.split()[0]}: unset RANK and WORLD_SIZE"
        )
    if (other.rank, other.world) != (claim.rank, claim.world):
        notes.append(f"ignored: {other.words}, since {claim.launcher} runs inside it")
        return claim
    notes.append(f"{other.words} says the same")
    known = claim.local_rank is not None
    return replace(
        claim,
        local_rank=claim.local_rank if known else other.local_rank,
        local_world=claim.local_world if known else other.local_world,
        node=other.node if claim.node is None else claim.node,
        address=claim.address or other.address,
        job=claim.job or other.job,
    )


def _placed(claim: Claim, environ: Mapping[str, str], notes: list[str]) -> Placement:
    """The claim, completed and checked."""
    why = [claim.words]
    named = environ.get("MASTER_ADDR") if claim.launcher != "mural" else None
    address = named or claim.address
    local_rank, local_world = _local_place(claim, address, why)
    if local_world > claim.world or local_rank >= local_world:
        raise PlanError(
            f"{claim.words}, but local rank {local_rank} of {local_world} on this machine: "
            "set LOCAL_RANK and LOCAL_WORLD_SIZE to this rank's place among those of its machine, or unset both"
        )
    port = None
    if claim.world == 1 or claim.launcher == "mural":
        address = None
    else:
        address = address or (LOOPBACK if local_world == claim.world else None)
        port = number(environ, "MASTER_PORT") or (_port(claim.job) if address else None)
        why.append(_meeting(address, port, named))
    if port is not None and port >= 2**16:
        raise PlanError(f"MASTER_PORT={port} is not a TCP port: set one from 1024 to 65535, the same on all ranks")
    node = 0 if claim.node is None and local_world == claim.world else claim.node
    return Placement(
        claim.rank, claim.world, local_rank, local_world, node, address, port, claim.launcher, (*why, *notes)
    )


def _port(job: str) -> int:
    """A port that all ranks of a job derive alike, and that other jobs on the machine are unlikely to use."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS if job else TORCH_PORT


def _meeting(address: str | None, port: int | None, named: str | None) -> str:
    if address is None:
        return "the ranks run on several machines, and MASTER_ADDR does not say where rank 0 is"
    source = "MASTER_ADDR" if named else "all ranks are on this machine" if address == LOOPBACK else "the node list"
    return f"rank 0 is at {address} ({source}), port {port}"


def _local_place(claim: Claim, address: str | None, why: list[str]) -> tuple[int, int]:
    """Local rank and number of local ranks; if no variable tells, guessed from whether rank 0 is on this machine."""
    if claim.local_rank is not None and claim.local_world is not None:
        return claim.local_rank, claim.local_world
    if claim.local_rank is not None:
        if claim.world > 1:
            why.append("no variable counts the ranks of this machine: taken as all")
        return claim.local_rank, claim.world
    rank, world = (claim.rank, claim.world) if address is None or address in HERE else (0, 1)
    if claim.world > 1:
        why.append(f"no variable numbers the ranks of this machine: taken as {rank} of {world}")
    return rank, world
