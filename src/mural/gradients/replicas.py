"""Replicas: the mesh axes along which parameters are replicated, and the ranks that differ only along some axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from mural.comm.groups import groups_of
from mural.errors import PlanError
from mural.ranks import AXES, SPATIAL, Mesh

REPLICAS = ("data", *SPATIAL)
"""The axes along which parameters are replicated."""


def named_axes(axes: Sequence[str] | None) -> tuple[str, ...]:
    """The axes in the mesh's order: for None all that hold replicas; "spatial" stands for all spatial axes.

    >>> named_axes(None), named_axes(["spatial"]), named_axes(["spatial1", "data"])
    (('data', 'spatial0', 'spatial1', 'spatial2'), ('spatial0', 'spatial1', 'spatial2'), ('data', 'spatial1'))
    """
    if axes is None:
        return REPLICAS
    wanted = {name for axis in axes for name in (SPATIAL if axis == "spatial" else (axis,))}
    if isinstance(axes, str) or not wanted <= set(REPLICAS):
        raise PlanError(f"axes={axes!r}: name some of 'data', 'spatial', {', '.join(map(repr, SPATIAL))} in a tuple")
    return tuple(axis for axis in REPLICAS if axis in wanted)


def ranks_along(mesh: Mesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """All ranks of a mesh, in groups that differ only along those axes; the same list on every rank."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in mesh.ranks or range(mesh.world):
        at = mesh.coordinates_of(rank)
        found.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def group_along(mesh: Mesh, axes: Sequence[str]) -> dist.ProcessGroup | None:
    """A process group of the ranks that differ from this one along those axes, only for collectives. Collective.

    None if this rank is alone. Messages between pieces run on the transport's group at the same time, so the two never
    mix.
    """
    every = ranks_along(mesh, axes)
    if len(every[0]) == 1:
        return None
    made = groups_of(mesh.transport, every, "collectives")
    return next(group for ranks, group in zip(every, made, strict=True) if mesh.rank in ranks)
