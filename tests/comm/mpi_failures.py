"""Ranks of an mpirun of which one fails, alone, while the others wait for it.

mpirun -n 2 python mpi_failures.py raise | exit | leave | kill | early
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import mural
from mural.comm import mpi


def main(how: str) -> None:
    torch.set_num_threads(1)
    mpi.register()
    if how == "early" and mpi.library().COMM_WORLD.rank == 1:
        raise ValueError("before the ranks have met")
    mesh = mural.init(spatial=(2,), backend="mpi")
    total = torch.ones(3)
    dist.all_reduce(total, group=mesh.transport.group)
    print(f"rank {mesh.rank} met {int(total[0])} ranks", flush=True)
    if mesh.rank == 1:
        if how == "raise":
            raise ValueError("no such file: image.tif")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(3)
        return
    dist.all_reduce(total, group=mesh.transport.group)
    print("rank 0 got an answer", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
