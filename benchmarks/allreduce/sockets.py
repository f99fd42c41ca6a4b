"""The same all-reduces over gloo's sockets and over MPI: what the software of the messages costs.

Document 000 (section 2) says that MPI greatly reduces the overhead of communication, compared with sockets. Calls,
sizes and rounds are the same; «backend» is gloo's own all-reduce, or that of the MPI library. Inside a node, MPI sends
through shared memory, which gloo does not; so MPI is also measured with its messages forced through TCP on the loopback
interface, as gloo's are. «MPI itself» is its blocking all-reduce of the same memory, without torch and mural's backend.

A time is the mean of several calls in a row: ranks do not leave a meeting at the same moment, and a call is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measured
from harness.mpi_jobs import launch
from harness.rank_jobs import note_failure, on_ranks
from harness.results import Log
from torch import Tensor

from mural.collectives.team import team_of
from mural.comm.mpi import library
from mural.errors import MuralError

HERE = Path(__file__).resolve().parent
GLOO = "gloo"
OPTIONS = {
    GLOO: (),
    "mpi": (),
    "mpi-tcp": ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"),
}
"""Of mpirun, by transport."""
NAMES, BARE = ("tree", "butterfly", "ring"), "MPI itself"
RANKS = (2, 4, 8)
SIZES = tuple(2**n for n in (10, 16, 20, 24))
SECONDS = 0.4
"""Of each size."""
MOST_IN_A_ROW, BYTES_IN_A_ROW = 32, 2**22


def in_a_row(size: int) -> int:
    """How many calls of a size follow each other without a meeting.

    >>> [in_a_row(size) for size in SIZES]
    [32, 32, 4, 1]
    """
    return max(1, min(MOST_IN_A_ROW, BYTES_IN_A_ROW // size))


def by_mpi(data: Tensor) -> None:
    """Add up over all ranks of the mpirun, by its library alone."""
    mpi = library()
    mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, data.numpy())


@dataclass(frozen=True)
class Calls:
    """All-reduces of several sizes, by mural's rounds and by the backend, on some ranks over one transport."""

    ranks: int
    transport: str
    sizes: tuple[int, ...] = SIZES
    seconds: float = SECONDS

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"sockets/{self.transport}/{self.ranks}"

    @property
    def about(self) -> dict[str, Any]:
        """What a record of it begins with."""
        return {"kind": "calls", "name": self.name, "transport": self.transport, "ranks": self.ranks}

    def measure(self) -> dict[str, Any]:
        """The seconds of each call, by bytes and by algorithm. Collective."""
        team = team_of(None)
        more = {} if self.transport == GLOO else {BARE: by_mpi}
        given = (self.seconds, NAMES, more)
        found = {str(size): measured.taken(team, size, *given, row=in_a_row(size)) for size in self.sizes}
        software = GLOO if self.transport == GLOO else library().Get_library_version().partition(",")[0]
        return {"found": found, "software": software}

    @property
    def expected(self) -> float:
        """Seconds that it takes on 16 cores, roughly: most of it for ranks to start."""
        return 3.0 + 0.2 * self.ranks + 1.2 * self.seconds * len(self.sizes)


def jobs(quick: bool) -> list[Calls]:
    """Every transport on every number of ranks."""
    if quick:
        return [Calls(2, transport, SIZES[:2], 0.05) for transport in OPTIONS]
    return [Calls(ranks, transport) for ranks in RANKS for transport in OPTIONS]


def carry_out(log: Log, wanted: Sequence[Calls], line: Any, quick: bool) -> None:
    """Measure jobs until the log's time is up: those over MPI under an mpirun each, one that fails apart."""
    for job in wanted:
        if job.transport == GLOO:
            on_ranks(log, [job], line=line)
        elif log.left > 0 and log.path is not None:
            given = (str(log.path), job.transport, *(["quick"] if quick else []))
            try:
                launch(job.ranks, HERE / "sockets_mpi.py", *given, options=OPTIONS[job.transport], limit=log.left + 30)
            except (MuralError, OSError) as error:
                note_failure(log, job, "failure", error)


def summary(record: dict[str, Any]) -> dict[str, float]:
    """The median seconds of the smallest call, by algorithm."""
    least = record["found"][min(record["found"], key=int)]
    return {name: measured.median(seconds) for name, seconds in least.items()}
