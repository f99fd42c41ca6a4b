"""Backends of torch.distributed: what each one can do, so that no other module depends on their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mural.comm.mpi.installation import NAME as MPI
from mural.comm.mpi.installation import takes_cuda_pointers
from mural.errors import PlanError

NCCL, GLOO = "nccl", "gloo"


@dataclass(frozen=True)
class Backend:
    """What a backend can do; one that is not in the table gets tensors on any device."""

    name: str
    on_stream: bool = False
    """Whether waiting for messages blocks the GPU's stream, not this process, and messages are in GPU memory."""
    takes_cuda: bool = True
    """Whether it accepts CUDA tensors."""
    host_by_gloo: bool = False
    """Whether gloo carries tensors on the host; waits for them can be interrupted."""
    eager: bool = False
    """Whether each message is sent by itself, with its own tag; otherwise a round's messages are posted together."""
    averages: bool = False
    """Whether its all-reduce can compute means."""
    adds_all: bool = False
    """Whether its all-reduce adds values of every type."""

    def __str__(self) -> str:
        return self.name

    @property
    def from_host(self) -> bool:
        """Whether it sends from host memory only: gloo does, and so does an MPI without CUDA support."""
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
    """The backend of a group's CUDA tensors if they have their own, otherwise the one for all tensors.

    For None (a single process), a backend without a name.
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
    """Whether every rank of a group is connected to every other one from the start, as over gloo."""
    try:
        return group._get_backend(torch.device("cpu")).name() == GLOO
    except RuntimeError:  # it has nothing for tensors on the CPU
        return False


def check_available(backend: str | None) -> None:
    """Raise for a backend, as the user names it, whose messages torch could not send here."""
    if backend == NCCL and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise PlanError(
            f'backend = "{backend}" sends from GPUs, but torch finds none, or has no NCCL: choose "gloo" or "auto", or '
            f"see what `mural doctor` says"
        )


def needs_mpirun(backend: str) -> bool:
    """Whether a backend, as the user names it, requires ranks that mpirun or srun started."""
    return backend in ("mpi", MPI)
