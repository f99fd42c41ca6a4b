"""torch.distributed over MPI: the backend `mural_mpi`, on mpi4py. See `backend`."""

from mural.comm.mpi.backend import METHOD, register
from mural.comm.mpi.installation import NAME, available, describe, library, loaded

__all__ = ["METHOD", "NAME", "available", "describe", "library", "loaded", "register"]
