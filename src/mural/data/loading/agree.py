"""Agreement: what all ranks know of a step, so that they go on together or raise the same error together.

Numbers are exchanged along one axis of the mesh after the other, by the transport whose alarm ends a wait for a rank
that raised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mural.comm import AXES, Mesh, stack


def greatest(values: Tensor, mesh: Mesh | None, name: str) -> Tensor:
    """The largest of all ranks' numbers, place by place; collective, the same on every rank (None: of this one)."""
    for axis in AXES:
        if mesh is not None and mesh.size(axis) > 1:
            values = stack(values, mesh.peers((axis,)), mesh.rank, mesh.transport, name).amax(0)
    return values


def said(texts: Sequence[str], mesh: Mesh | None, name: str) -> list[str]:
    """The texts that ranks brought, place by place: where this rank brings "", that of a rank which does not.

    Ranks that bring a text for the same place must bring the same one. Collective.
    """
    encoded = [text.encode() for text in texts]
    longest = int(greatest(torch.tensor([max(map(len, encoded), default=0)]), mesh, name).item())
    rows = torch.zeros(len(texts), longest, dtype=torch.uint8)
    for row, code in zip(rows, encoded, strict=True):
        if code:
            row[: len(code)] = torch.frombuffer(bytearray(code), dtype=torch.uint8)
    found = greatest(rows, mesh, name)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in found]
