"""All-reduces over MPI, on the ranks of an mpirun: `mpirun -n 8 python sockets_mpi.py FILE.jsonl mpi`.

`mural bench allreduce --parts sockets` starts this; the second argument is what the file calls the transport.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sockets
import sockets_page
from harness.mpi_jobs import join, measure

MINUTES = 2.0


def main() -> None:
    """One rank's part; rank 0 prints and writes."""
    if len(sys.argv) not in (3, 4) or sys.argv[2] not in sockets.OPTIONS or sys.argv[3:] not in ([], ["quick"]):
        raise SystemExit(f"python sockets_mpi.py FILE.jsonl mpi|mpi-tcp [quick], but was given {sys.argv[1:]}")
    ranks, transport = join(), sys.argv[2]
    toys = [job for job in sockets.jobs(quick=True) if job.transport == transport]
    wanted = toys if sys.argv[3:] else [sockets.Calls(ranks, transport)]
    script, given = "benchmarks/allreduce/sockets_mpi.py", sockets.OPTIONS[transport]
    measure(script, Path(sys.argv[1]), wanted, MINUTES, "CPU, one thread a rank", sockets_page.line, options=given)


if __name__ == "__main__":
    main()
