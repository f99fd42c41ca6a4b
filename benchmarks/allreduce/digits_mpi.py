"""The digits over MPI, on CPUs or with CUDA tensors: `mpirun -n 4 python benchmarks/allreduce/digits_mpi.py cuda`.

Rank 0 writes results/mpi-digits.json, or into the folder that is named after the device.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import digits
import page
import torch
import torch.distributed as dist
from harness.options import DEVICES
from harness.results import machine, rounded

import mural
from mural.ranks.join import placement

HERE = Path(__file__).resolve().parent
KINDS, SEEDS = {"weights": [32], "gradients": [32]}, [0, 1]


def main() -> None:
    """One rank's part; rank 0 prints and writes."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    if device not in DEVICES[1:] or len(sys.argv) > 3:
        raise SystemExit(f"python digits_mpi.py {'|'.join(DEVICES[1:])} [FOLDER], but was given {sys.argv[1:]}")
    folder = Path(sys.argv[2]) if len(sys.argv) == 3 else HERE / "results"
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    ranks = placement().world
    rank = mural.init(data=ranks, backend="mpi").rank
    records = digits.measure(rank, KINDS, SEEDS, digits.EPOCHS, device)
    if rank:
        return
    on = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    results: dict[str, Any] = {
        "command": f"mpirun -n {ranks} python benchmarks/allreduce/digits_mpi.py {device}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_at_start": load,
        "torch": torch.__version__,
        "note": f"Tensors on: {on}; messages by {dist.get_backend()}.",
        "records": records,
    }
    print(page.TEXTS["digits"](results))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mpi-digits.json").write_text(page.as_json(rounded(results)))


if __name__ == "__main__":
    main()
