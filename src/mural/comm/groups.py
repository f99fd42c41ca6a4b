"""Process groups as mural creates and keeps them: the same ranks and purpose get the same group again.

A group costs threads and sockets for as long as the run lasts, so successive models share theirs. Between two steps no
message is under way in any of them; after a failed step some may be, and all groups are abandoned.

NCCL takes CUDA tensors only. The flags, shapes and texts that ranks compare are on the host; sent through the GPU, each
would wait for all of its work. So a group over NCCL also has a gloo half, and torch sends each tensor through the half
for its device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from mural.comm.backends import GLOO, backend_of
from mural.comm.failure.connections import destroyed, interruptible, watch

BOTH = "cpu:gloo,cuda:nccl"

T = TypeVar("T")
_kept: dict[dist.ProcessGroup, dict[Hashable, Any]] = {}
"""What was built on the ranks of each group, by name."""


class HasGroup(Protocol):
    """The transport of a run."""

    group: dist.ProcessGroup | None
    timeout: float


def kept(group: dist.ProcessGroup | None, name: Hashable, build: Callable[[], T], anew: bool = False) -> T:
    """What a name stands for on the ranks of a group, built at the first call; it goes with the group. Collective."""
    if group is None:
        return build()
    if group not in _kept:
        for old in [old for old in _kept if destroyed(old)]:
            del _kept[old]  # it keeps the sockets of its group
    found = _kept.setdefault(group, {})
    if anew or name not in found:
        found[name] = build()
    return found[name]


def leave(group: dist.ProcessGroup | None) -> None:
    """Drop all that was kept for a group: messages of a failed step may be under way. Collective."""
    if group is not None:
        _kept.pop(group, None)


def group_of(run: HasGroup, ranks: tuple[int, ...], purpose: str, pairwise: bool = False) -> dist.ProcessGroup:
    """A group of some ranks of a run, for one purpose. Collective over the run."""
    return groups_of(run, [ranks], purpose, pairwise)[0]


def groups_of(
    run: HasGroup, every: Sequence[tuple[int, ...]], purpose: str, pairwise: bool = False
) -> list[dist.ProcessGroup]:
    """A group for each list of ranks, for one purpose. Collective over the run: all ranks create all groups.

    NCCL would connect the ranks of a group at its first call, and each would wait there for the others, which may wait
    for a message from it. So all groups are connected now, in one order, unless only two ranks of them meet at a time.
    """

    def build() -> list[dist.ProcessGroup]:
        what = f"a group for {purpose}, of ranks {', '.join(map(str, every))}"
        made = interruptible(run.group, what, lambda: [new_group(ranks, run.timeout) for ranks in every])
        for ranks, group in zip(every, made, strict=True):
            if not pairwise and dist.get_rank() in ranks:
                connect(group)
        return made

    return kept(run.group, (purpose, tuple(every)), build)


def group_on_host(run: HasGroup, purpose: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group of all ranks over gloo, whatever the run uses, for one purpose. Collective."""

    def new() -> dist.ProcessGroup:
        return cast(Any, dist.new_group(backend=GLOO, timeout=timeout))

    return kept(dist.group.WORLD, purpose, lambda: interruptible(run.group, f"a group for {purpose}", new))


def new_group(ranks: Sequence[int] | None, timeout: float) -> dist.ProcessGroup:
    """A group of some ranks, or of all, over the backend of the run. Collective over the run.

    It waits for ranks that have ended, too; `interruptible` does not.
    """
    backend = BOTH if backend_of(dist.group.WORLD).on_stream else None
    if backend is not None:
        survive_errors()
    chosen = None if ranks is None else list(ranks)
    group: Any = dist.new_group(chosen, timeout=timedelta(seconds=timeout), backend=backend)
    if backend is not None and (ranks is None or dist.get_rank() in ranks):
        watch(group)
    return cast(dist.ProcessGroup, group)


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in a group, and the group's size; None stands for a single process."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def survive_errors() -> None:
    """Let torch abort the communicators of a failed group at once, but not the process, which reports what happened.

    By default torch would first spend a minute dumping what each rank did last.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def connect(group: dist.ProcessGroup) -> None:
    """Create the communicator of a group now: all its ranks must join, and some use it later than others.

    Collective over the group.
    """
    if backend_of(group).on_stream:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
