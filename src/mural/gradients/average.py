"""Weights and buffers averaged over ranks: local SGD, and running statistics that each rank kept by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.channel.share import shares_among
from mural.errors import PlanError
from mural.gradients.buckets import in_buckets
from mural.gradients.replicas import REPLICAS, group_along, named_axes
from mural.gradients.replicated import check_same
from mural.ranks import Mesh


@torch.no_grad()
def average_weights(model: nn.Module, mesh: Mesh, axes: Sequence[str] = ("data",)) -> None:
    """Replace parameters and floating-point buffers by their mean over those axes, with the same bits on every rank.

    For local SGD: each part of the data axis takes its own steps, with gradients of `Reducer(…, axes=("spatial",))`,
    and every k steps the weights are averaged. Ranks along the other axes must hold equal weights. A tensor that is
    equal everywhere keeps its bits. Collective.
    """
    average([*model.parameters(), *model.buffers()], mesh, named_axes(axes))


@torch.no_grad()
def average_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Replace floating-point buffers by their mean over data × spatial: statistics of `batchnorm_scope("rank")`.

    Running statistics are linear in the statistics of each batch. So averaging them after every step, or once before
    they are used or saved, gives the same result: each step moves them by the mean of the pieces' statistics.
    Collective.
    """
    average(list(model.buffers()), mesh, REPLICAS)


def average(tensors: Sequence[Tensor], mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Write into each floating-point tensor its mean over the ranks along the axes."""
    mesh = mesh.folded
    distinct = {id(t): t for t in tensors if t.is_floating_point() or t.is_complex()}
    if shares := shares_among(distinct.values()):
        raise PlanError(f"{shares[0][1].name} is split by channels: only whole weights can be averaged")
    group = group_along(mesh, axes)
    others = tuple(axis for axis in REPLICAS if axis not in axes)
    alike = group_along(mesh, others)
    if group is None:
        return
    with mesh.transport.meeting("weights", group):
        check_same(list(distinct.values()), group, "average_weights and average_buffers", mesh.transport)
        average_over(distinct.values(), group, alike)


def average_over(tensors: Iterable[Tensor], group: dist.ProcessGroup, alike: dist.ProcessGroup | None) -> None:
    """Write into each tensor its mean over a group; the ranks of `alike` take the first one's."""
    for bucket in in_buckets(tensors):
        mean = mean_of(torch.cat([t.detach().reshape(-1) for t in bucket]), group)
        if alike is not None:
            # A backend may add in a different order in each group; ranks that held equal weights must keep equal
            # weights.
            dist.broadcast(mean, group_src=0, group=alike)
        offset = 0
        for t in bucket:
            t.copy_(mean[offset : offset + t.numel()].view(t.shape))
            offset += t.numel()


def mean_of(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over a group, as the first rank's values plus the mean distance from them: exact for equal values."""
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    first = wide.clone()
    dist.broadcast(first, group_src=0, group=group)
    # For equal values the distance is zero, even between infinities.
    distance = torch.where(wide == first, torch.zeros_like(wide), (wide - first) / group.size())
    dist.all_reduce(distance, group=group)
    return (first + distance).to(values.dtype)
