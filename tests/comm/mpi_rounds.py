"""mpirun -n 3 python mpi_rounds.py FOLDER: every algorithm over MPI against the simulation, and a rank that differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from test_allreduce import compared

import mural
from mural.errors import PeerError

if __name__ == "__main__":
    torch.set_num_threads(1)
    mesh = mural.init(data=3, backend="mpi")
    found = [list(map(str, case)) for case in compared((2, 1003), 1024)]
    said = ""
    try:
        mural.comm.all_reduce(torch.ones(11 if mesh.rank == 1 else 10), "ring")
    except PeerError as error:
        said = str(error)
    Path(sys.argv[1], f"{mesh.rank}.json").write_text(json.dumps([found, said]), encoding="utf-8")
