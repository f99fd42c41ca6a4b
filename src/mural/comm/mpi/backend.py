"""The backend `mural_mpi`, and how a rank ends under MPI: together with all others, or, if it failed, by ending them.

`MPI_Finalize` waits for all ranks. A rank that fails would wait there for ranks that wait for its messages. So every
rank says farewell to all others before it waits there, and a wait for a rank that has left ends with an error. A rank
that fails gives the others a few seconds to end by themselves, and then lets MPI end them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from mural.comm.hosts import host
from mural.comm.mpi.installation import NAME, library
from mural.comm.mpi.process_group import MPIGroup
from mural.comm.mpi.progress import Engine
from mural.errors import PeerError, PlanError

# -- the end of a rank -------------------------------------------------------------------------------------------------


GRACE_SECONDS = 5.0
_failed: list[type[BaseException]] = []


@cache
def engine() -> Engine:
    """The engine of this process; the first call is collective over all ranks."""
    return Engine(library().COMM_WORLD.Dup())


@cache
def watch_the_end() -> None:
    """Register how this process ends: mpi4py finalizes MPI at exit, and was loaded before, so this runs first."""
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
    """Say farewell, and wait until all others have too; after an error, only briefly."""
    found.close()
    world = module.COMM_WORLD
    said = [found.farewells.Isend(b"", rank) for rank in range(world.size) if rank != world.rank]
    waiting, until = [*said, world.Ibarrier()], time.monotonic() + GRACE_SECONDS
    while not module.Request.Testall(waiting):
        if _failed and time.monotonic() > until:
            return
        time.sleep(1e-3)


# -- the backend -------------------------------------------------------------------------------------------------------


METHOD = "mpi://"
CONNECT_SECONDS = 3.0
_shared: Any = dist  # torch's stubs leave the stores out


def register() -> None:
    """Start MPI, and register the backend `mural_mpi` and the rendezvous `mpi://` with torch; once is enough."""
    library()
    watch_the_end()
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
        register_rendezvous_handler(METHOD.partition(":")[0], rendezvous)


def create(options: Any, _: Any) -> MPIGroup:
    """The process group of some ranks, with its own communicator. Collective over them."""
    world = library().COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if ranks[options.group_rank] != world.rank or max(ranks) >= world.size:
        raise PlanError(
            f"torch counts this process as rank {ranks[options.group_rank]} of ranks {ranks}, but MPI as rank "
            f"{world.rank} of {world.size}: start it with mpirun or srun, for torchrun starts no MPI"
        )
    seconds = options.timeout.total_seconds()
    # MPI creates a communicator in a call that waits for all ranks without a timeout: so they meet first.
    meet(options.store, len(ranks), seconds)
    with engine().lock:
        communicator = world.Create_group(world.Get_group().Incl(ranks), zlib.crc32(options.group_id.encode()) % 2**15)
    return MPIGroup(options.store, communicator, ranks, engine(), options.group_id, seconds)


def meet(store: Any, count: int, seconds: float) -> None:
    """Wait until that many ranks have come here, or raise."""
    arrived = store.add("mpi/arrived", 1)
    if arrived == count:
        store.set("mpi/all", "1")
    try:
        store.wait(["mpi/all"], timedelta(seconds=seconds))
    except RuntimeError as error:
        there = store.add("mpi/arrived", 0)
        raise PeerError(
            f"{there} of {count} ranks made the process group within {seconds:g} s: every rank must call new_group"
        ) from error


def rendezvous(_: str, timeout: timedelta = timedelta(minutes=10), **__: Any) -> Iterator[tuple[Any, int, int]]:
    """The store that rank 0 serves, this process's rank and the number of ranks, all from MPI. Collective.

    If all ranks are on one host, the store listens on the loopback address only. Otherwise it listens on all addresses
    of rank 0, and the others take the first that answers; MASTER_ADDR and MASTER_PORT, if set on rank 0, decide
    instead.
    """
    world = library().COMM_WORLD
    local = len(set(world.allgather(host()))) == 1
    if world.rank == 0:
        listener = listening("127.0.0.1" if local else "", int(os.environ.get("MASTER_PORT", "0")))
        port, token = listener.getsockname()[1], secrets.token_hex(8)
        names = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ and not local else addresses(local)
        store = _shared.TCPStore(
            "127.0.0.1", port, world.size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        store.set("mpi/token", token)
        world.bcast((names, port, token))
    else:
        names, port, token = world.bcast(None)
        store = reached(names, port, token, timeout)
    yield store, world.rank, world.size
    raise RuntimeError("processes of an MPI run cannot meet again: start the run again")


def listening(address: str, port: int) -> socket.socket:
    """A socket that listens on one address, or on all."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen(2048)
    return made


def addresses(local: bool) -> list[str]:
    """The names and addresses under which others may reach this host."""
    if local:
        return ["127.0.0.1"]
    name = socket.gethostname()
    found = [name, socket.getfqdn()]
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)]
    return list(dict.fromkeys(found + interfaces()))


def interfaces() -> list[str]:
    """The IPv4 addresses of this host's interfaces, without the loopback."""
    import fcntl  # noqa: PLC0415  # not on every system
    import struct  # noqa: PLC0415

    request, found = 0x8915, list[str]()  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def reached(names: list[str], port: int, token: str, timeout: timedelta) -> Any:
    """The store at the first of rank 0's addresses that answers and has rank 0's token."""
    for name in names:
        try:
            # Another program may listen on that port if a name resolves to this host.
            socket.create_connection((name, port), timeout=CONNECT_SECONDS).close()
            store = _shared.TCPStore(name, port, None, False, timedelta(seconds=CONNECT_SECONDS), False)
            if store.get("mpi/token") == token.encode():
                store.set_timeout(timeout)
                return store
        except (OSError, RuntimeError):
            continue
    raise PlanError(
        f"rank 0 listens on port {port}, but none of its addresses {names} answers from {socket.gethostname()}: set "
        "MASTER_ADDR on rank 0 to an address that this host reaches, and MASTER_PORT to a port that is open"
    )
