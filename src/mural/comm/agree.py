"""Agreement: an error on one rank becomes an error on every rank, instead of a wait for a rank that will not come."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mural.comm.mesh import Mesh
from mural.errors import MuralError, PeerError


@contextmanager
def together(mesh: Mesh, what: str) -> Generator[None]:
    """A block without communication, which every rank leaves alike: where one raised, the others raise too. Collective.

    The rank that failed raises its own error; the others raise one of the same kind that quotes it where the kind is
    mural's, else a `PeerError`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    share_failure(mesh, what, failure)


def share_failure(mesh: Mesh, what: str, failure: Exception | None) -> None:
    """Raise on every rank if some rank failed. Collective."""
    if mesh.world > 1 and any_rank(mesh, failure is not None)[0]:
        told: list[tuple[type[MuralError], str] | None] = [None] * mesh.world
        kind = type(failure) if isinstance(failure, MuralError) else PeerError
        mine = None if failure is None else (kind, f"{type(failure).__name__}: {failure}")
        dist.all_gather_object(told, mine, group=mesh.transport.group)
        if failure is None:
            rank, (kind, text) = next((r, t) for r, t in enumerate(told) if t is not None)
            raise kind(f"{what} failed on rank {rank}: {text.removeprefix(kind.__name__ + ': ')}")
    if failure is not None:
        raise failure


def any_rank(mesh: Mesh, *mine: bool) -> tuple[bool, ...]:
    """For each statement whether it holds on any rank. Collective: one small message."""
    if mesh.world == 1:
        return mine
    flags = mesh.transport.outbound(torch.tensor([float(m) for m in mine]))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.transport.group)
    return tuple(flag > 0 for flag in flags.tolist())
