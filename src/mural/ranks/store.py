"""The store in which a run's ranks find each other, on loopback if all are on one machine."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mural.comm.hosts import LOCAL_STORE
from mural.errors import DISTRIBUTION, PeerError, PlanError
from mural.ranks.identity import LOOPBACK, Placement

_stores: Any = dist  # its stubs leave these out

_meetings = itertools.count()

POLL_SECONDS, SETTLE_SECONDS = 0.02, 0.5
WORLD = "mural/world"
"""Where ranks write how many they are, and who is which."""
SIOCGIFADDR = 0x8915
"""Linux's request number for the address of an interface."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Which network interface the backends listen on."""


def meet(place: Placement, timeout: float) -> Any:
    """The store in which all ranks of a placement meet; rank 0 holds it, unless the launcher does."""
    if place.launcher == "mural":
        address, port = os.environ[LOCAL_STORE].rsplit(":", 1)
        # The store outlives a process group; the next one must not find its addresses.
        return _stores.PrefixStore(f"group{next(_meetings)}", client(address, int(port), timeout))
    if place.address is None or place.port is None:
        address, port = ask_mpi(place)
    else:
        address, port = place.address, place.port
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) and place.launcher == "torchrun":
            return fresh(client(address, port, timeout), place.rank, place.world, timeout)
        if place.rank > 0:
            return gathered(client(address, port, timeout), place, timeout)
        return gathered(host(address, port, 0, timeout, loopback=place.one_machine), place, timeout)
    except PeerError:
        raise
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise PeerError(
            f"rank {place.rank} of {place.world} did not meet the others at {address}:{port} ({reason}): check that "
            f"all ranks run and can reach it, or set MASTER_ADDR and MASTER_PORT on all. {'; '.join(place.why)}"
        ) from error


def client(address: str, port: int, timeout: float) -> Any:
    """The store that another process holds."""
    limit = timedelta(seconds=timeout)
    return _stores.TCPStore(address, port, None, False, timeout=limit, wait_for_workers=False)


def host(address: str, port: int, world: int, timeout: float, loopback: bool) -> Any:
    """A store held by this process, once all ranks of a world have arrived; a world of 0 does not wait.

    torch would listen on every interface. With `loopback`, no other machine can connect. Port 0 means any free port.
    """
    limit, waits = timedelta(seconds=timeout), world > 0
    if not loopback:
        return _stores.TCPStore(address, port, world or None, is_master=True, timeout=limit, wait_for_workers=waits)
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
    except OSError as error:
        listener.close()
        raise PlanError(
            f"port {port} of {LOOPBACK} is taken ({error.strerror}): set MASTER_PORT on all ranks"
        ) from error
    listener.listen(1024)
    port = listener.getsockname()[1]
    number = listener.detach()
    return _stores.TCPStore(
        LOOPBACK, port, world or None, True, timeout=limit, wait_for_workers=waits, master_listen_fd=number
    )


def gathered(store: Any, place: Placement, timeout: float) -> Any:
    """The store, once all ranks of a world have arrived; raises where they were not started as one world.

    torch would wait for its whole timeout: for ranks that other variables number differently, or number twice.
    """
    wrong, until = f"{WORLD}/wrong", time.monotonic() + timeout
    me = f"process {os.getpid()} on {socket.gethostname()}"
    if (world := store.compare_set(WORLD, "", str(place.world)).decode()) != str(place.world):
        store.set(wrong, f"rank {place.rank} was started with WORLD_SIZE={place.world}, but another one with {world}")
    elif (there := store.compare_set(f"{WORLD}/{place.rank}", "", me).decode()) != me:
        store.set(wrong, f"{there} and {me} both have RANK={place.rank}")
    awaited = list(range(place.world))
    while awaited and time.monotonic() < until:
        if store.check([wrong]):
            time.sleep(0 if place.rank else SETTLE_SECONDS)  # the store ends with rank 0: let the others read it
            raise PlanError(f"{store.get(wrong).decode()}: give every rank the same WORLD_SIZE and a RANK of its own")
        awaited = [rank for rank in awaited if not store.check([f"{WORLD}/{rank}"])]
        time.sleep(POLL_SECONDS if awaited else 0)
    if awaited:
        raise PeerError(
            f"rank {place.rank} of {place.world} waited {timeout:.0f} s for ranks {awaited}: see whether they run. "
            f"{'; '.join(place.why)}"
        )
    return store


def fresh(store: Any, rank: int, world: int, timeout: float) -> Any:
    """A part of a store that no earlier attempt of the run wrote to, agreed on by the ranks of this attempt.

    The store of torchrun's agent outlives a restart, and holds the addresses of ranks that are gone; the number of the
    restart differs between machines. So rank 0 draws a name, and repeats what each rank drew: a rank that finds its own
    draw there knows that the name is current.
    """
    drawn, until = secrets.token_hex(8), time.monotonic() + timeout
    others = range(1, world)
    if rank > 0:
        store.set(f"mural/drawn/{rank}", drawn)
    while time.monotonic() < until:
        if rank > 0:
            name, *repeated = _read(store, "mural/name").split()
            if rank <= len(repeated) and repeated[rank - 1] == drawn:
                store.set(f"mural/taken/{rank}", name)
                return _stores.PrefixStore(name, store)
        else:
            store.set("mural/name", " ".join([drawn, *(_read(store, f"mural/drawn/{r}") for r in others)]))
            if all(_read(store, f"mural/taken/{r}") == drawn for r in others):
                return _stores.PrefixStore(drawn, store)
        time.sleep(POLL_SECONDS)
    missing = [r for r in others if _read(store, f"mural/taken/{r}") != drawn] if rank == 0 else [0]
    raise PeerError(f"rank {rank} of {world} waited {timeout:.0f} s for ranks {missing}: see whether they run")


def _read(store: Any, key: str) -> str:
    """The value of a key; a dash if it is not set."""
    return store.get(key).decode() if store.check([key]) else "-"


def ask_mpi(place: Placement) -> tuple[str, int]:
    """Rank 0's address and a free port there, sent to all ranks through MPI, which ends again unless it ran before."""
    fix = "set MASTER_ADDR and MASTER_PORT on all ranks (mpirun -x MASTER_ADDR=…), or start them with torchrun"
    where = f"{place.launcher} started {place.world} ranks on several machines, and MASTER_ADDR is not set"
    began = "mpi4py.MPI" not in sys.modules
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        raise PlanError(
            f'{where}; mpi4py could tell, but: {error}. pip install "{DISTRIBUTION}[mpi]", or {fix}'
        ) from error
    world = MPI.COMM_WORLD
    if world.size != place.world:
        raise PlanError(f"{where}; mpi4py could tell, but belongs to another MPI and sees {world.size} ranks: {fix}")
    told: tuple[str, int] = world.bcast((socket.gethostname(), free_port()) if world.rank == 0 else None)
    if began:
        MPI.Finalize()  # otherwise a rank that raises would wait at exit for all others, which wait for its messages
    return told


def stay_local(environ: MutableMapping[str, str], force: bool = False) -> None:
    """Let the backends listen on loopback only; what the user chose stays, unless `force`."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    for variable in INTERFACES:
        if loopback is not None and (force or variable not in environ):
            environ[variable] = loopback


def stand_apart(environ: MutableMapping[str, str], rank: int) -> None:
    """Let NCCL accept ranks that share a GPU, by taking each for a separate machine.

    Messages then go through sockets: slow, but with NCCL's own order and errors, for experiments on one GPU.
    """
    environ.setdefault("NCCL_HOSTID", f"rank{rank}")
    environ.setdefault("NCCL_IB_DISABLE", "1")


def reach_out(environ: MutableMapping[str, str], address: str) -> None:
    """Let gloo listen where other machines can reach this one, if it would not by itself; what the user chose stays.

    gloo listens on the address of the host's name. On many systems that is a loopback address, and no other machine can
    connect. The interface that leads to rank 0 is then the right one.
    """
    if INTERFACES[0] in environ or not _is_loopback(socket.gethostname()):
        return
    interface = interface_to(address)
    if interface is not None:
        environ[INTERFACES[0]] = interface


def interface_to(address: str) -> str | None:
    """The network interface through which this machine reaches an address; None for loopback, or if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: the system only chooses its own address
            own = probe.getsockname()[0]
            interfaces = {_address_of(probe, name): name for _, name in socket.if_nameindex()}
    except OSError:
        return None
    return None if own.startswith("127.") else interfaces.get(own)


def _address_of(probe: socket.socket, interface: str) -> str:
    """The IPv4 address of an interface; empty if it has none."""
    try:
        import fcntl  # noqa: PLC0415  (Windows has none)

        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except (ImportError, OSError):
        return ""
    return socket.inet_ntoa(answer[20:24])


def _is_loopback(name: str) -> bool:
    """Whether a name resolves to a loopback address, or to none."""
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return True


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
