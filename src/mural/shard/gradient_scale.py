"""The scale of gradients: what a piece's gradient is inside backward, and what it is for the user.

Every rank differentiates its own copy of the loss, so inside backward a piece's gradient is that of the sum of all
copies: too large by the number of ranks, and spread over the ranks that hold the same piece.
"""

from __future__ import annotations

from torch import Tensor

from mural.ranks import SPATIAL
from mural.shard.gradient_guard import mirror_gradient
from mural.shard.layout import Layout
from mural.shard.relayout import merged
from mural.shard.tensor import ShardedTensor


def replicated_axes(layout: Layout) -> tuple[str, ...]:
    """The data and spatial axes along which every rank holds the same piece."""
    used, mesh = layout.axes_of(range(layout.ndim)), layout.mesh.now or layout.mesh
    return tuple(axis for axis in ("data", *SPATIAL) if mesh.size(axis) > 1 and axis not in used)


def true_gradient(grad: Tensor, layout: Layout) -> Tensor:
    """The single-device gradient of a piece."""
    found = merged(grad, layout.mesh.now or layout.mesh, replicated_axes(layout), "gradient")
    return found / layout.mesh.replicas if layout.mesh.replicas > 1 else found


def raw_gradient(grad: Tensor, layout: Layout) -> Tensor:
    """The inverse of `true_gradient`: a piece's gradient inside backward."""
    copies = 1
    for axis in replicated_axes(layout):
        copies *= (layout.mesh.now or layout.mesh).size(axis)
    return grad * (layout.mesh.replicas / copies) if layout.mesh.replicas > copies else grad


def require_gradient(x: ShardedTensor, wanted: bool = True) -> ShardedTensor:
    """Turn the gradient of a leaf on or off; it arrives with the true scale."""
    placement = x.placement
    if wanted and x.carrier.requires_grad and not x.carrier.is_leaf:
        return x  # an intermediate result: no change, as in torch
    x.drop_margin()
    x.local.requires_grad_(wanted)
    if wanted and not hasattr(x.local, "_mural_scaled"):
        x.local._mural_scaled = x.local.register_hook(lambda grad: true_gradient(grad, placement))  # type: ignore[attr-defined]
    mirror_gradient(x, wanted)
    return x
