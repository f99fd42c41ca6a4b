"""Process groups as mural makes them: over NCCL for CUDA tensors, with gloo next to it for tensors on the host.

NCCL takes CUDA tensors alone. The flags, shapes and texts that ranks compare are on the host, and through the GPU each
would wait for all of its work. So a group of ours over NCCL has a gloo half, and torch sends a tensor through the half
of its device.

A wait over NCCL keeps the GPU, not the process: `work.wait()` returns at once, and the process stops at the next value
that it reads. To end such a wait, the communicator is aborted; then the GPU goes on with whatever its memory holds. So
the reason is noted before, all groups of the process end together, and `check` raises before such values are used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from mural.errors import PeerError

NCCL, BOTH = "nccl", "cpu:gloo,cuda:nccl"
ABORT_SECONDS = 10.0
"""How long an abort may take before this process goes on without its end."""

_nccl: list[dist.ProcessGroup] = []
"""The groups of this process that have communicators of NCCL."""
_ending = threading.Lock()
_ended: list[str] = []
"""Why they were ended, if they were."""


def backend_of(group: Any) -> str:
    """The backend of a group's CUDA tensors where it has one of their own, else the one that it has for all."""
    name = dist.get_backend(group)
    if NCCL in name:
        return NCCL
    if name != "undefined":  # a group that was made without naming a backend
        return name
    kinds = {str(kind) for kind in group._device_types}
    return group._get_backend(torch.device("cuda" if "cuda" in kinds else "cpu")).name()


def new_group(ranks: Sequence[int] | None, timeout: float) -> dist.ProcessGroup:
    """A group of some ranks, or of all, over the backend of the run. Collective over the run."""
    backend = BOTH if backend_of(dist.group.WORLD) == NCCL else None
    if backend is not None:
        survive_errors()
    chosen = None if ranks is None else list(ranks)
    group: Any = dist.new_group(chosen, timeout=timedelta(seconds=timeout), backend=backend)
    if backend is not None and (ranks is None or dist.get_rank() in ranks):
        watch(group)
    return cast(dist.ProcessGroup, group)


def survive_errors() -> None:
    """Let torch end the communicators of a failed group at once, and not the process: it lives to say what happened.

    Else torch would first write down, for a minute, what each rank did last.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def watch(group: dist.ProcessGroup) -> None:
    """Count a group among those that end together."""
    if group not in _nccl:
        _nccl.append(group)


def connect(group: dist.ProcessGroup) -> None:
    """Make the communicator of a group's messages now: all its ranks have to come, and some exchange later than others.

    Collective over the group.
    """
    if backend_of(group) == NCCL:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def give_up(reason: str) -> None:
    """End the groups of this process, where it has any of NCCL: its GPU may wait for messages that nobody sends."""
    if _nccl:
        end(reason)


def end(reason: str) -> None:
    """Abort every communicator of this process, so that waits on the GPU end; none can be used again.

    An abort gives memory back, and waits there for whatever the GPU still runs, such as the kernels of another
    communicator that wait too. So all are aborted at the same time.
    """
    with _ending:
        if _ended:
            return
        _ended.append(reason)
    aborts = [threading.Thread(target=_half(group).abort, daemon=True, name="mural-abort") for group in _living()]
    for thread in aborts:
        thread.start()
    for thread in aborts:
        thread.join(ABORT_SECONDS)


def ended() -> str:
    """Why the groups of this process were ended; empty where they were not."""
    return _ended[0] if _ended else ""


def trouble() -> str:
    """Why the groups of this process were ended, or what NCCL found wrong with one; empty where all is well."""
    if _ended:
        return ended()
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
