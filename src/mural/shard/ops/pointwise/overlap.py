"""Whether an in-place operation reads memory that it writes, in which case torch's own result depends on the order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.tensor import ShardedTensor

COPIES = ("copy_",)
"""Operations that move values alone, which shift a tensor within itself as torch does."""
MOST_WORK = 10_000
"""Steps that the search for a common element may take; an unfinished one counts as overlap."""


START = 4096
"""An address, which is never read; NumPy takes 0 for none."""


class _Memory:
    """The place of a tensor's elements, as NumPy reads it, without touching them."""

    def __init__(self, tensor: Tensor):
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (START + tensor.storage_offset() * size, True),
            "shape": tuple(tensor.shape),
            "strides": tuple(s * size for s in tensor.stride()),
            "typestr": f"|V{size}",
        }


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one memory share elements without being the same view."""
    if a is b or not a.numel() or not b.numel() or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    if a.storage_offset() == b.storage_offset() and a.shape == b.shape and a.stride() == b.stride():
        return False
    try:
        return np.shares_memory(np.asarray(_Memory(a)), np.asarray(_Memory(b)), max_work=MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def check_overlap(name: str, target: ShardedTensor, operands: Iterable[Any]) -> None:
    """Raise if an operand of an in-place operation is partly the memory that it writes to."""
    if name in COPIES:
        return
    for operand in operands:
        if isinstance(operand, ShardedTensor) and operand is not target and overlap(target.local, operand.local):
            raise UnsupportedOp(
                f"{name} writes to a tensor of shape {tuple(target.shape)} and reads a view of the same memory, of "
                f"shape {tuple(operand.shape)}: torch's result depends on the order of its loop. Give it a copy: "
                f".clone()"
            )
