"""The end of a rank under MPI: in order with all others, or, if it failed, with the end of all others.

`MPI_Finalize` waits for all ranks. A rank that ends by an error would wait there for ranks that wait for its messages.
So every rank says farewell to all before it waits there, and a wait for a rank that has left ends with an error. A rank
that fails gives the others some seconds to end by themselves, and then has MPI end them.
"""

from __future__ import annotations

import atexit
import sys
import time
from functools import cache
from types import TracebackType
from typing import Any

from mural.comm.mpi.installation import library
from mural.comm.mpi.progress import Engine

GRACE_SECONDS = 5.0
_failed: list[type[BaseException]] = []


@cache
def engine() -> Engine:
    """The engine of this process; the first call is collective over all ranks."""
    return Engine(library().COMM_WORLD.Dup())


@cache
def watch_the_end() -> None:
    """Arrange how this process ends: mpi4py finalizes MPI at exit, and was loaded before, so this comes first."""
    before = sys.excepthook

    def noticed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _failed.append(kind)
        before(kind, error, trace)

    sys.excepthook = noticed
    atexit.register(leave)


def leave() -> None:
    """End this rank together with all others; after an error, end them."""
    module = library()
    if module.Is_finalized():
        return
    if engine.cache_info().currsize:
        part(module, engine())
    if _failed:
        sys.stdout.flush()
        sys.stderr.flush()
        module.COMM_WORLD.Abort(1)


def part(module: Any, found: Engine) -> None:
    """Say farewell, and wait until all others have; after an error, not for long."""
    found.close()
    world = module.COMM_WORLD
    said = [found.farewells.Isend(b"", rank) for rank in range(world.size) if rank != world.rank]
    waiting, until = [*said, world.Ibarrier()], time.monotonic() + GRACE_SECONDS
    while not module.Request.Testall(waiting):
        if _failed and time.monotonic() > until:
            return
        time.sleep(1e-3)
