"""Merging: the plain tensors that ranks along some axes of the mesh have, stacked or added up, alike on each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mural.comm import stack
from mural.ranks import Mesh


def merged(value: Tensor, mesh: Mesh, axes: Sequence[str], name: str) -> Tensor:
    """The sum of the tensors of all ranks along those axes, added in one order; the same bits on each."""
    return stacked(value, mesh, axes, name).sum(0) if axes else value


def stacked(value: Tensor, mesh: Mesh, axes: Sequence[str], name: str) -> Tensor:
    """The tensors of all ranks along those axes in a new leading dim."""
    return stack(value, mesh.peers(axes), mesh.rank, mesh.transport, name)
