"""The seconds of the digits over MPI: `mpirun -n 80 --oversubscribe python digits_mpi_elapsed.py FILE.jsonl`.

The all-reduce called «backend» is Open MPI's own there, the one that the original calls «allreduce».
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import elapsed
import elapsed_page
from harness.mpi_jobs import join, measure

MINUTES = 4.0


def main() -> None:
    """One rank's part; rank 0 prints and writes."""
    if len(sys.argv) not in (2, 3) or (len(sys.argv) == 3 and sys.argv[2] != "quick"):
        raise SystemExit(f"python digits_mpi_elapsed.py FILE.jsonl [quick], but was given {sys.argv[1:]}")
    ranks = join()
    widths, epochs = ((32,), 2) if len(sys.argv) == 3 else (elapsed.WIDTHS, elapsed.digits.EPOCHS)
    jobs = [elapsed.Elapsed(ranks, width, epochs, "MPI") for width in widths]
    script = "benchmarks/allreduce/digits_mpi_elapsed.py"
    measure(script, Path(sys.argv[1]), jobs, MINUTES, "CPU, one thread a rank", elapsed_page.line)


if __name__ == "__main__":
    main()
