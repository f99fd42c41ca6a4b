"""Gradients that were averaged: which ones are, and whether all ranks brought the same parameters."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm import Transport
from mural.errors import LayoutError
from mural.gradients.fibres import REPLICAS
from mural.gradients.waiting import wait_for


def mark_reduced(grad: Tensor, axes: Sequence[str] = REPLICAS) -> None:
    """Note that a gradient is the mean over those axes now; whatever is added to it later changes its version."""
    grad._mural_reduced = (grad._version, frozenset(axes))  # type: ignore[attr-defined]


def is_reduced(grad: Tensor | None, axes: Sequence[str] = REPLICAS) -> bool:
    """Whether this gradient was reduced over at least those axes and nothing was added since."""
    version, reduced = getattr(grad, "_mural_reduced", (None, frozenset[str]()))
    return grad is not None and version == grad._version and reduced.issuperset(axes)


def check_same(tensors: Sequence[Tensor], group: dist.ProcessGroup, name: str, transport: Transport) -> None:
    """Raise on every rank of a group if the ranks brought different lists of tensors."""
    code = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode())
    device = tensors[0].device if tensors else torch.device("cpu")
    both = torch.tensor([code, -code, len(tensors), -len(tensors)], device=device)
    work: Any = dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group, async_op=True)
    wait_for(work, transport, name)
    if both[0] != -both[1] or both[2] != -both[3]:
        raise LayoutError(
            f"{name} got different parameters on different ranks (here {len(tensors)}, elsewhere {int(-both[3])} to "
            f"{int(both[2])}, or of other shapes): give every rank the same model"
        )
