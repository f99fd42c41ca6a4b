"""Presence: every rank hears from every other one, before they wait for each other where nobody could tell them.

torch makes a process group through a store, and waits there for a rank that has ended as it would for a slow one. A
group that is connected knows better: its connections to that rank are closed.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mural.errors import PeerError

TAG, NEVER = 0x6D75, 0x6D76
"""Apart from messages that others send over the same group."""


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


def connected(group: dist.ProcessGroup) -> bool:
    """Whether every rank of a group has a connection to every other one from the beginning on: gloo."""
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:  # it has nothing for tensors on the CPU
        return False
