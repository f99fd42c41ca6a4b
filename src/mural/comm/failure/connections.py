"""Connections of process groups: whether every rank is there, and how all waits in a group are ended.

torch makes a process group through a store, and waits there for a rank that has ended as it would for a slow one. A
group of gloo that is connected knows better: its connections to that rank are closed. To end the waits in it, a rank
closes its own.

A wait over NCCL keeps the GPU, not the process: `work.wait()` returns at once, and the process stops at the next value
that it reads. To end such a wait, the communicator is aborted; then the GPU goes on with whatever its memory holds. So
the reason is noted before, all groups of the process end together, and `check` raises before such values are used.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mural.comm.backends import connected
from mural.errors import PeerError

TAG, NEVER = 0x6D75, 0x6D76
"""Apart from messages that others send over the same group."""
ABORT_SECONDS = 10.0
"""How long an abort may take before this process goes on without its end."""

_nccl: list[dist.ProcessGroup] = []
"""The groups of this process that have communicators of NCCL."""
_ending = threading.Lock()
_ended: list[str] = []
"""Why they were ended, if they were."""


def roll_call(group: dist.ProcessGroup | None, what: str, flag: bool = False) -> bool:
    """Whether any rank of a group brings the flag; raises where a rank has ended, with its number. Collective.

    Groups that are not connected from the beginning on, as NCCL's, are not asked, and bring no flag.
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


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Close this rank's connections of a group, so that nobody waits there for what does not come.

    After a rank has ended, some wait for those that saw it; the store that the alarm needs may have gone with it. gloo
    closes all connections of a group in which a message was not there in time: one that nobody sends never is.
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
    """Which ranks did not come to what, in words."""
    names = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, sorted(gone)))}"
    return (
        f"{what}: {names} ended, or cannot be reached ({gone[min(gone)]}): see the log there, mend what ended it, and "
        f"start all ranks again"
    )


def reason(error: BaseException) -> str:
    """What gloo or a store said, without its own source's place and advice.

    >>> reason(RuntimeError("[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:4. This is typically …"))
    'Connection closed by peer [127.0.0.1]:4'
    """
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = text.partition("] ")[2] if text.startswith("[") and "] " in text else text
    return text.partition(". This is typically")[0].rstrip(". ")


def watch(group: dist.ProcessGroup) -> None:
    """Count a group among those that end together."""
    if group not in _nccl:
        _nccl.append(group)


def abort_all(reason: str) -> None:
    """Abort every communicator of NCCL that this process has, so that waits on the GPU end; none can be used again.

    An abort gives memory back, and waits there for whatever the GPU still runs, such as the kernels of another
    communicator that wait too. So all are aborted at the same time.
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
    """Why the groups of this process were ended; empty where they were not."""
    return _ended[0] if _ended else ""


def trouble() -> str:
    """Why the groups of this process were ended, or what NCCL found wrong with one; empty where all is well."""
    if _ended:
        return _ended[0]
    for group in _living():
        error = str(_half(group).get_error()).rpartition(".")[2]
        if error != "SUCCESS":
            return f"NCCL reports {error} in the group of ranks {dist.get_process_group_ranks(group)}: see the log"
    return ""


def _living() -> list[dist.ProcessGroup]:
    """The groups of NCCL that were not destroyed since."""
    _nccl[:] = [group for group in _nccl if not destroyed(group)]
    return _nccl


def _half(group: Any) -> Any:
    """What carries a group's CUDA tensors."""
    return group._get_backend(torch.device("cuda"))


def destroyed(group: dist.ProcessGroup | None) -> bool:
    """Whether torch knows a group no more."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return True
    return False


def await_gpu(name: str) -> None:
    """Wait until the GPU has done all that the calling stream was given, messages of NCCL included, or raise.

    What comes after this reads values that are there: results, gradients that an optimizer takes.
    """
    if _nccl:
        torch.cuda.current_stream().synchronize()
        check(name)


def check(name: str) -> None:
    """Raise if the groups of this process ended: what the GPU computed since may be anything."""
    reason = trouble() if _nccl else ""
    if reason:
        raise PeerError(f"{name}: {reason}")


def forget() -> None:
    """Know of no group: the run that they belonged to is over."""
    _nccl.clear()
    _ended.clear()
