"""Backends of torch.distributed: what each of them can do, so that nobody else has to know them by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mural.comm.mpi.installation import NAME as MPI
from mural.comm.mpi.installation import takes_cuda_pointers

NCCL, GLOO = "nccl", "gloo"


@dataclass(frozen=True)
class Backend:
    """What a backend can do; one that is not in the table is handed tensors wherever they are."""

    name: str
    on_stream: bool = False
    """Whether a wait for messages keeps the GPU's stream and not this process, and their memory is the GPU's."""
    takes_cuda: bool = True
    """Whether it can be handed CUDA tensors."""
    host_by_gloo: bool = False
    """Whether gloo carries tensors on the host; a wait for them can be cut short."""
    eager: bool = False
    """Whether messages are on their way one by one, each with its tag; else those of a round are posted together."""
    averages: bool = False
    """Whether its all-reduce gives means."""
    adds_all: bool = False
    """Whether its all-reduce adds values of every type."""

    def __str__(self) -> str:
        return self.name

    @property
    def from_host(self) -> bool:
        """Whether messages leave from host memory alone: gloo's do, and those of an MPI that takes no CUDA pointers."""
        return not self.takes_cuda or (self.name == MPI and not takes_cuda_pointers())


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(NCCL, on_stream=True, host_by_gloo=True, averages=True),
        Backend(GLOO, takes_cuda=False, host_by_gloo=True, eager=True),
        Backend(MPI, eager=True, adds_all=True),
    )
}


def backend_of(group: Any) -> Backend:
    """The backend of a group's CUDA tensors where it has one of their own, else the one that it has for all.

    For None, a process alone, one without a name.
    """
    if group is None:
        return Backend("")
    name = dist.get_backend(group)
    if NCCL in name:
        name = NCCL
    elif name == "undefined":  # a group that was made without naming a backend
        kinds = {str(kind) for kind in group._device_types}
        name = group._get_backend(torch.device("cuda" if "cuda" in kinds else "cpu")).name()
    return BACKENDS.get(name) or Backend(name)


def connected(group: dist.ProcessGroup) -> bool:
    """Whether every rank of a group has a connection to every other one from the beginning on: over gloo."""
    try:
        return group._get_backend(torch.device("cpu")).name() == GLOO
    except RuntimeError:  # it has nothing for tensors on the CPU
        return False


def needs_mpirun(backend: str) -> bool:
    """Whether the ranks of a backend, as a user names it, can be started by mpirun or srun alone."""
    return backend in ("mpi", MPI)
