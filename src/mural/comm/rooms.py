"""Rooms: the groups that a run has opened for some of its ranks, kept for the next model that needs the same.

A group of processes costs threads and sockets for as long as the run lasts, so models that follow each other share
theirs. Between two steps nothing is under way in any of them; where a step failed, something may be, and all are left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mural.comm.failure.connections import roll_call
from mural.comm.groups import new_group
from mural.comm.messages import Transport

T = TypeVar("T")
_open: WeakKeyDictionary[Transport, dict[Hashable, Any]] = WeakKeyDictionary()


def room(world: Transport, name: Hashable, build: Callable[[], T]) -> T:
    """What was built under a name on the ranks of a run, now or before. Collective."""
    rooms = _open.setdefault(world, {})
    if name not in rooms:
        rooms[name] = build()
    return rooms[name]


def group_of(world: Transport, ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
    """A group of those ranks, for one purpose. Collective over the run."""

    def build() -> dist.ProcessGroup:
        roll_call(world.group, f"a group of ranks {ranks}")
        return new_group(ranks, world.timeout)

    return room(world, (purpose, ranks), build)


def leave(world: Transport) -> None:
    """Use none of the groups again: messages of a step that failed may be under way in them. Collective."""
    _open.pop(world, None)
