"""Fibres: the ranks that differ along some axes of the mesh alone, and a process group for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mural.comm import Transport
from mural.comm.failure.connections import roll_call
from mural.comm.groups import new_group
from mural.errors import PlanError
from mural.ranks import AXES, SPATIAL, Mesh

REPLICAS = ("data", *SPATIAL)
"""The axes along which parameters are replicated."""

_groups: WeakKeyDictionary[Transport, dict[Any, dist.ProcessGroup]] = WeakKeyDictionary()


def named_axes(axes: Sequence[str] | None) -> tuple[str, ...]:
    """The axes in the mesh's order: all that hold replicas for None; "spatial" stands for its dims.

    >>> named_axes(None), named_axes(["spatial"]), named_axes(["spatial1", "data"])
    (('data', 'spatial0', 'spatial1', 'spatial2'), ('spatial0', 'spatial1', 'spatial2'), ('data', 'spatial1'))
    """
    if axes is None:
        return REPLICAS
    wanted = {name for axis in axes for name in (SPATIAL if axis == "spatial" else (axis,))}
    if isinstance(axes, str) or not wanted <= set(REPLICAS):
        raise PlanError(f"axes={axes!r}: name some of 'data', 'spatial', {', '.join(map(repr, SPATIAL))} in a tuple")
    return tuple(axis for axis in REPLICAS if axis in wanted)


def fibres(mesh: Mesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """All ranks of a mesh, in groups that differ along those axes alone; the same list on every rank."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in mesh.ranks or range(mesh.world):
        at = mesh.coordinates_of(rank)
        found.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def group_of(mesh: Mesh, axes: Sequence[str]) -> dist.ProcessGroup | None:
    """A process group of this rank's fibre, for collectives alone; None where the fibre is this rank. Collective.

    It is made once. Messages between pieces run on the transport's group at the same time, and the two never meet.
    """
    every = fibres(mesh, axes)
    if len(every[0]) == 1:
        return None
    known = _groups.setdefault(mesh.transport, {})
    key = tuple(every)
    if key not in known:
        roll_call(mesh.transport.group, f"groups along {', '.join(axes)}")
        for ranks in every:  # each rank takes part in making each group, in one order
            group = new_group(ranks, mesh.transport.timeout)
            if mesh.rank in ranks:
                known[key] = group
    return known[key]
