"""Checksums of tensors: one number from all bits of the values and their positions, the same on every device.

The bits are read as integers, in rows along the last dim. The sums of rows and of columns are added up with
pseudo-random weights, all modulo 2⁶⁴: two passes over memory, no rounding, and the order of addition does not matter.
So tensors with other values have another checksum, and so have those that were flipped, turned or permuted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK, CPU_BLOCK = 2**25, 2**20
"""Values that are processed together: enough to be worth a kernel, and few enough for a CPU's cache."""


def checksum(tensor: Tensor) -> int:
    """A 64-bit number that is the same for tensors of the same shape, type and bits; 0 if there are no values.

    >>> x = torch.arange(12.0).view(3, 4)
    >>> checksum(x) == checksum(x.t().contiguous().t()), checksum(x) == checksum(x.flip(1))
    (True, False)
    """
    tensor = tensor.detach()
    if not tensor.numel() or tensor.is_meta or tensor.layout != torch.strided:
        return 0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    width = tensor.shape[-1] if tensor.ndim else 1
    rows: list[Tensor] = []
    columns: Tensor | None = None
    for block in blocks(tensor, CPU_BLOCK if tensor.device.type == "cpu" else BLOCK):
        bits = integers(block.reshape(-1, width))
        rows.append(bits.sum(1, dtype=torch.int64))
        more = bits.sum(0, dtype=torch.int64)
        columns = more if columns is None else columns + more
    sums = torch.cat(rows)
    total = (sums * weights(len(sums), 1, sums.device)).sum()
    return int(total if columns is None else total + (columns * weights(len(columns), 2, columns.device)).sum())


def blocks(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """The tensor in parts of about that many values, in the order of its indices."""
    if tensor.ndim < 2 or tensor.numel() <= limit:
        yield tensor.contiguous()
        return
    each = tensor[0].numel()
    if each > limit and tensor.ndim > 2:
        for part in tensor:
            yield from blocks(part, limit)
        return
    step = max(1, limit // each)
    for start in range(0, len(tensor), step):
        yield tensor[start : start + step].contiguous()


def integers(rows: Tensor) -> Tensor:
    """The bits of rows as integers, of eight bytes each if a row has a multiple of eight."""
    size = rows.element_size()
    if rows.shape[1] * size % 8:
        return rows.view(INTEGERS[size])
    # Whether to pack must depend only on the shape, not on where in memory the values begin.
    return (rows.clone() if rows.storage_offset() * size % 8 else rows).view(torch.int64)


def weights(count: int, salt: int, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers, by position: the last steps of SplitMix64, in signed integers."""
    z = torch.arange(1, count + 1, device=device) * -7046029254386353131 + salt * 6364136223846793005
    z = (z ^ (z >> 30)) * -4658895280553007687
    z = (z ^ (z >> 27)) * -7723592293110705685
    return (z ^ (z >> 31)) | 1
