"""Training over MPI: `mpirun -n 2 python benchmarks/hybrid/over_mpi.py cuda OUT/mpi-cuda.jsonl`.

The document lists «verified data parallel MPI results» and «verified model parallel MPI results» as to be added. Every
way that runs on so many ranks trains as it does over gloo, with the same weights and batches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import page
import torch
from harness.mpi_jobs import join, measure
from harness.options import DEVICES
from training import Training


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=DEVICES[1:])
    parser.add_argument("output", type=Path, help="mpi-DEVICE.jsonl; it goes on where it was stopped")
    parser.add_argument("--iterations", type=int, default=400, help="of each training (400)")
    parser.add_argument("--width", type=int, help="channels of the first convolution (32 on a GPU, else 8)")
    parser.add_argument("--batch", type=int, default=200, help="images of an iteration (200)")
    parser.add_argument("--minutes", type=float, default=5.0, help="stop after about this long (5)")
    parser.add_argument("--quick", action="store_true", help="a few iterations, to try it out")
    options = parser.parse_args()
    options.width = options.width or (32 if options.device == "cuda" else 8)
    return options


def main() -> None:
    """One rank's part; rank 0 prints and writes."""
    options = arguments()
    ranks = join()
    ways = ["data", "model", "hybrid", *(["hybrid, in two groups"] if ranks > 2 and ranks % 2 == 0 else [])]
    iterations, width, batch, more = options.iterations, options.width, options.batch, {}
    if options.quick:
        iterations, width, batch, more = 4, 4, 12, {"each": 40, "tests": 10}
    jobs = [
        Training(way, ranks, batch, iterations, width, 0.01, options.device, transport="MPI", **more) for way in ways
    ]
    on = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, one thread a rank"
    measure("benchmarks/hybrid/over_mpi.py", options.output, jobs, options.minutes, on, page.line, part="mpi")


if __name__ == "__main__":
    main()
