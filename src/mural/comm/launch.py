"""Joining a run: which process group this process belongs to, and starting local ranks without a launcher."""

from __future__ import annotations

import atexit
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mural.comm import mpi
from mural.comm.choice import settle
from mural.comm.transport import Transport
from mural.errors import PlanError

_transports: dict[int, Transport] = {}


def join(backend: str | None, timeout: float) -> tuple[int, int, Transport]:
    """World size, rank and transport of the process group that exists, or that the environment names.

    A process group made before (by Lightning, Ray, or the caller) is joined. torchrun's variables start
    one: NCCL where each rank has a GPU of its own, else gloo. Without either, the world is this process.
    Over gloo, the ranks then find out how their GPU tensors travel fastest; see `mural.comm.choice`.
    """
    backend = mpi.NAME if backend == "mpi" else backend
    if not dist.is_initialized() and backend == mpi.NAME:
        mpi.register()
        dist.init_process_group(backend, init_method=mpi.METHOD, timeout=timedelta(seconds=timeout))
        atexit.register(leave)
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return 1, 0, Transport(None, timeout)
        world = int(os.environ["WORLD_SIZE"])
        if world > 1:
            dist.init_process_group(backend or default_backend(), timeout=timedelta(seconds=timeout))
            atexit.register(leave)
        else:
            return 1, 0, Transport(None, timeout)
    elif backend is not None and backend != dist.get_backend():
        raise PlanError(f"backend={backend!r}, but the process group found uses {dist.get_backend()!r}: drop backend")
    world_group = dist.group.WORLD
    key = id(world_group)
    if key not in _transports:
        # A group of our own: DDP's collectives on the default group never meet our messages.
        group = cast(dist.ProcessGroup, dist.new_group(timeout=timedelta(seconds=timeout)))
        _transports.clear()
        transport = Transport(group, timeout)
        settle(transport)
        _transports[key] = transport
    return dist.get_world_size(), dist.get_rank(), _transports[key]


def leave() -> None:
    """Leave the process group that `join` made; torch may abort a process that ends inside one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def default_backend() -> str:
    """NCCL where every local rank has a GPU of its own, else gloo."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return "nccl"
    return "gloo"


def run_local(function: Callable[..., None], ranks: int, *args: Any, threads: int | None = None) -> None:
    """Call `function(rank, *args)` in that many new processes of this machine, joined by gloo; wait for all.

    The first rank that raises ends the others, and its traceback is raised here.
    """
    with tempfile.TemporaryDirectory(prefix="mural-") as folder:
        store = Path(folder) / "store"
        mp.spawn(_local_rank, (function, ranks, str(store), threads, args), nprocs=ranks)  # type: ignore[no-untyped-call]


def _local_rank(
    rank: int,
    function: Callable[..., None],
    ranks: int,
    store: str,
    threads: int | None,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    shared: Any = dist  # its stubs leave the stores out
    dist.init_process_group("gloo", store=shared.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
