"""Joining a run: the process group that exists, or the one that the launcher's variables name."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mural.comm import mpi
from mural.comm.backends import GLOO, NCCL, backend_of, check_available, needs_mpirun
from mural.comm.failure.connections import forget, interruptible, roll_call
from mural.comm.failure.shared_fate import given_up
from mural.comm.groups import connect, kept, new_group, survive_errors
from mural.comm.groups import leave as leave_group
from mural.comm.messages import Transport
from mural.comm.path_choice import settle
from mural.errors import PlanError
from mural.ranks.identity import Placement, resolve
from mural.ranks.store import meet, reach_out, stand_apart, stay_local

SETTLE_SECONDS = 0.1
TRANSPORT = "the transport of the run"


def join(backend: str | None, timeout: float) -> tuple[int, int, Transport]:
    """World size, rank and transport of the existing process group, or of the one that the environment describes.

    A process group made before (by Lightning, Ray, or the caller) is joined. Otherwise the variables of torchrun,
    mpirun or srun start one: NCCL if each rank has its own GPU, else gloo. Without either, the world is this process.
    Over gloo, the ranks then find out how their GPU tensors travel fastest; see `mural.comm.path_choice`.
    """
    backend = mpi.NAME if backend is not None and needs_mpirun(backend) else backend
    if not dist.is_initialized() and backend == mpi.NAME:
        start_mpi(timeout)
    elif not dist.is_initialized():
        place = resolve(os.environ)
        if place.world == 1:
            return 1, 0, Transport(None, timeout)
        start(place, backend, timeout)
        atexit.register(leave)
    elif backend is not None and backend != backend_of(dist.group.WORLD).name:
        found = backend_of(dist.group.WORLD).name
        raise PlanError(f"backend={backend!r}, but the process group found uses {found!r}: drop backend")
    transport = kept(dist.group.WORLD, TRANSPORT, lambda: connected(timeout))
    # A rank that ended before it got here is named; after a failed step, all ranks use new connections.
    if roll_call(dist.group.WORLD, "mural.init", given_up(transport)):
        leave_group(transport.group)
        transport = kept(dist.group.WORLD, TRANSPORT, lambda: connected(timeout), anew=True)
    return dist.get_world_size(), dist.get_rank(), transport


def connected(timeout: float) -> Transport:
    """A transport of all ranks, in a separate group, so that DDP's collectives never mix with our messages.

    Collective.
    """
    forget()
    listen_for_others()
    group = interruptible(dist.group.WORLD, "mural.init", lambda: new_group(None, timeout))
    connect(group)
    transport = Transport(group, timeout)
    settle(transport)
    return transport


def listen_for_others() -> None:
    """Let gloo listen where other machines can reach this one: an existing group over NCCL has no gloo yet."""
    place = Placement()
    with suppress(PlanError):  # variables that contradict each other: the group counts, and gloo finds its own way
        place = resolve(os.environ)
    if place.address is not None and not place.one_machine:
        reach_out(os.environ, place.address)


def placement() -> Placement:
    """The place of this process among the ranks, and why: `print(*placement().why, sep="\\n")`.

    An existing process group takes precedence over the variables that launchers set.
    """
    if not dist.is_initialized():
        return resolve(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = backend_of(dist.group.WORLD)
    found = f"a process group of {world} ranks over {backend} exists, and this process is its rank {rank}"
    try:
        place = resolve(os.environ)
    except PlanError as error:
        place = Placement(why=(f"not looked at: {error}",))
    if place.launcher != "single" and (place.rank, place.world) == (rank, world):
        return replace(place, why=(*place.why, found))
    return Placement(rank, world, node=None, launcher="process group", why=(found, *place.why))


def start(place: Placement, backend: str | None, timeout: float) -> None:
    """Start the process group of a placement; without a backend, the ranks agree on one."""
    if place.one_machine:
        stay_local(os.environ, force=place.launcher == "mural")
    elif place.address is not None:
        reach_out(os.environ, place.address)
    check_available(backend)
    store = meet(place, timeout)
    gpu = take_gpu(place) if backend in (None, NCCL) else ""
    usual = agreed_backend(store, place, gpu) if backend in (None, NCCL) else backend
    if backend == NCCL != usual:
        stand_apart(os.environ, place.rank)
    survive_errors()
    dist.init_process_group(
        backend or usual,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout),
    )


def start_mpi(timeout: float) -> None:
    """Start the process group of MPI's ranks, which already know each other."""
    mpi.register()
    place = resolve(os.environ)
    if place.one_machine:
        stay_local(os.environ)  # for gloo, which writes checkpoints next to MPI
    take_gpu(place)
    dist.init_process_group(mpi.NAME, init_method=mpi.METHOD, timeout=timedelta(seconds=timeout))
    atexit.register(leave)


def take_gpu(place: Placement) -> str:
    """The number of this rank's GPU on its machine, which becomes the current device; empty without one.

    If the user has chosen a device other than the first, it stays.
    """
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return ""
    if not (torch.cuda.is_initialized() and torch.cuda.current_device() > 0):
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def agreed_backend(store: Any, place: Placement, gpu: str) -> str:
    """NCCL if every rank has its own GPU, else gloo; the same on every rank.

    A launcher may show each rank all GPUs of its machine or only its own, so the ranks compare what they took.
    """
    store.set(f"mural/gpu/{place.rank}", gpu)
    gpus = [store.get(f"mural/gpu/{rank}") for rank in range(place.world)]
    return NCCL if b"" not in gpus and len(set(gpus)) == place.world else GLOO


def leave() -> None:
    """Leave the process group that `join` made; torch may abort a process that ends inside one.

    gloo's threads drop the tensors of the last collectives a moment after these end, and need the interpreter for that:
    if it is gone, the process aborts.
    """
    if dist.is_initialized():
        time.sleep(SETTLE_SECONDS)
        dist.destroy_process_group()
