"""Connections of process groups: whether every rank is present, and how to end all waits in a group.

torch creates a process group through a store, and there waits for a rank that has ended as if it were slow. A connected
gloo group can tell: its connections to that rank are closed. So the ranks of a connected group watch it while they
create another one. To end the waits in a group, a rank closes its own connections.

A wait over NCCL blocks the GPU, not the process: `work.wait()` returns at once, and the process stops at the next value
that it reads. To end such a wait, the communicator is aborted; then the GPU continues with whatever its memory holds.
So the reason is recorded first, all groups of the process end together, and `check` raises before such values are used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mural.comm.backends import connected
from mural.errors import MuralError, PeerError

T = TypeVar("T")
TAG, NEVER = 0x6D75, 0x6D76
"""Tags that no other messages over the same group have."""
ABORT_SECONDS = 10.0
"""How long an abort may take before this process continues without waiting for it."""
LOOK_SECONDS = 0.25
"""How often a rank that waits for the others elsewhere looks at its connections to them."""

_nccl: list[dist.ProcessGroup] = []
"""The groups of this process that have NCCL communicators."""
_ending = threading.Lock()
_ended: list[str] = []
"""Why they were ended, if they were."""


def roll_call(group: dist.ProcessGroup | None, what: str, flag: bool = False) -> bool:
    """Whether the flag is set on any rank of a group; raises with its number if a rank has ended. Collective.

    Groups that are not connected from the start, such as NCCL's, are not asked: False.
    """
    if group is None or not connected(group):
        return False
    mine, own = torch.tensor([flag], dtype=torch.uint8, device="cpu"), dist.get_rank()
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != own]
    heard = {rank: torch.zeros_like(mine) for rank in others}
    works: list[tuple[int, Any]] = []
    gone: dict[int, str] = {}
    for rank in others:
        try:
            works.append((rank, dist.irecv(heard[rank], rank, group=group, tag=TAG)))
            works.append((rank, dist.isend(mine, rank, group=group, tag=TAG)))
        except RuntimeError as error:
            gone.setdefault(rank, reason(error))
    for rank, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            gone.setdefault(rank, reason(error))
    if gone:
        raise PeerError(missing(gone, what))
    return flag or any(bool(tensor.item()) for tensor in heard.values())


def interruptible(group: dist.ProcessGroup | None, what: str, call: Callable[[], T]) -> T:
    """What a call returns that creates groups on all ranks of a group; raises if one of them ends first. Collective.

    Nothing ends the call's wait for a rank that has ended, so it runs in a thread, which is left behind then:

        rank 0   roll call ── call ───────── roll call ── goes on
        rank 1   roll call ── call (slow) ── roll call ── goes on: nobody ended before it was done
        rank 2   roll call ── ✗ ended: the others see its closed connection, close their own, and raise

    Groups that are not connected from the start, such as NCCL's, cannot tell: the call is made as it is.
    """
    if group is None or not connected(group):
        return call()
    roll_call(group, what)
    future: futures.Future[T] = futures.Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="mural-groups").start()
    gone: dict[int, str] = {}
    try:
        while not gone and not futures.wait([future], LOOK_SECONDS).done:
            gone = closed(group)
        if gone:
            raise PeerError(missing(gone, what))
        made = future.result()
    except BaseException as error:
        hang_up(group)
        if isinstance(error, RuntimeError) and not isinstance(error, MuralError):
            raise PeerError(f"{what}: {reason(error)}. A rank may have ended: see the logs") from error
        raise
    roll_call(group, what)
    return made


def closed(group: dist.ProcessGroup) -> dict[int, str]:
    """The ranks to which a connected group has no connection any more, with the error of each."""
    gone: dict[int, str] = {}
    for rank in dist.get_process_group_ranks(group):
        if rank != dist.get_rank():
            try:
                dist.irecv(torch.zeros(1, device="cpu"), rank, group=group, tag=NEVER)
            except RuntimeError as error:
                gone[rank] = reason(error)
    return gone


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Close this rank's connections of a group, so that no rank waits there for messages that will not come.

    After a rank has ended, some wait for those that noticed; the store that the alarm needs may be gone too. gloo
    closes all connections of a group in which a message timed out: one that nobody sends always does.
    """
    if group is None or not connected(group):
        return
    for rank in dist.get_process_group_ranks(group):
        if rank != dist.get_rank():
            with suppress(RuntimeError):
                work: Any = dist.irecv(torch.zeros(1, device="cpu"), rank, group=group, tag=NEVER)
                work.wait(timedelta(milliseconds=1))


def ended(error: BaseException, *heard: str) -> bool:
    """Whether an error says that a connection to a peer was closed, and not that an alarm was heard."""
    return isinstance(error, PeerError) and error.__cause__ is not None and not any(heard)


def missing(gone: dict[int, str], what: str) -> str:
    """A description of which ranks are missing, and where."""
    names = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, sorted(gone)))}"
    return (
        f"{what}: {names} ended, or cannot be reached ({gone[min(gone)]}): see the log there, fix the cause, and "
        f"start all ranks again"
    )


def reason(error: BaseException) -> str:
    """The error of gloo or a store, without its source location and advice.

    >>> reason(RuntimeError("[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:4. This is typically …"))
    'Connection closed by peer [127.0.0.1]:4'
    """
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = text.partition("] ")[2] if text.startswith("[") and "] " in text else text
    return text.partition(". This is typically")[0].rstrip(". ")


def is_pause(error: RuntimeError) -> bool:
    """Whether a wait ended only because its own time was over; torch may append a C++ stack trace to what it says.

    >>> is_pause(RuntimeError("Operation timed out!\\nException raised from wait at …/Work.cpp:93"))
    True
    """
    return str(error).partition("\n")[0] == "Operation timed out!"


def watch(group: dist.ProcessGroup) -> None:
    """Register a group among those that end together."""
    if group not in _nccl:
        _nccl.append(group)


def abort_all(reason: str) -> None:
    """Abort every NCCL communicator of this process, so that waits on the GPU end; none can be used again.

    An abort frees memory, and for that waits for whatever the GPU still runs, such as the waiting kernels of another
    communicator. So all are aborted at the same time.
    """
    with _ending:
        if _ended or not _nccl:
            return
        _ended.append(reason)
    aborts = [threading.Thread(target=_half(group).abort, daemon=True, name="mural-abort") for group in _living()]
    for thread in aborts:
        thread.start()
    for thread in aborts:
        thread.join(ABORT_SECONDS)


def aborted() -> str:
    """Why the groups of this process were ended; empty if they were not."""
    return _ended[0] if _ended else ""


def trouble() -> str:
    """Why the groups of this process were ended, or the error that NCCL reports for one; empty if there is none."""
    if _ended:
        return _ended[0]
    for group in _living():
        error = str(_half(group).get_error()).rpartition(".")[2]
        if error != "SUCCESS":
            return f"NCCL reports {error} in the group of ranks {dist.get_process_group_ranks(group)}: see the log"
    return ""


def _living() -> list[dist.ProcessGroup]:
    """The NCCL groups that have not been destroyed since."""
    _nccl[:] = [group for group in _nccl if not destroyed(group)]
    return _nccl


def _half(group: Any) -> Any:
    """The backend of a group's CUDA tensors."""
    return group._get_backend(torch.device("cuda"))


def destroyed(group: dist.ProcessGroup | None) -> bool:
    """Whether torch no longer knows a group."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return True
    return False


def await_gpu(name: str) -> None:
    """Wait until the GPU has done all work on the calling stream, NCCL messages included, or raise.

    What comes after this reads values that have arrived: results, or gradients for an optimizer.
    """
    if _nccl:
        torch.cuda.current_stream().synchronize()
        check(name)


def check(name: str) -> None:
    """Raise if the groups of this process ended: what the GPU has computed since may be garbage."""
    reason = trouble() if _nccl else ""
    if reason:
        raise PeerError(f"{name}: {reason}")


def forget() -> None:
    """Forget all groups: the run that they belonged to is over."""
    _nccl.clear()
    _ended.clear()
