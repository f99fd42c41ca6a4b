"""Kernels for norms of channels-last tensors on a GPU, which move their bytes once, at the speed of the memory.

torch's own take 2.4 times as long to apply statistics and to find them, and cannot be joined with an activation.
They are operations of torch (`torch.ops.mural`), so whoever notes operations sees them; on a CPU they are plain torch.
Without Triton, or where it cannot compile, torch's own kernels do it all (`fast`).

    channel_affine       (x − mean) · scale + shift      and at least 0, if an activation is joined
    channel_moments      count, mean and squared deviation of parts of the rows, to be merged: (parts, 3, C)
    channel_gradients    grad · scale, and Σ grad and Σ grad · (x − mean) of each channel: (2, C);
                         the gradient may be that of an activation's results, which are given then
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from mural.comm.exchange import CHANNELS_LAST
from mural.errors import LayoutError

try:
    from mural.shard.ops.norm import triton_kernels
except ImportError:  # torch for CPUs comes without Triton
    triton_kernels = None

NARROW = (torch.float16, torch.bfloat16, torch.float32)
"""Types whose sums have float32."""
AT_ONCE = 4096
"""Numbers that a program loads at once."""
PROGRAMS = 2048
"""How many programs there are at least, if there are as many numbers."""

library = torch.library.Library("mural", "DEF")
library.define("channel_affine(Tensor x, Tensor mean, Tensor scale, Tensor shift, bool relu=False) -> Tensor")
library.define("channel_moments(Tensor x) -> Tensor")
library.define(
    "channel_gradients(Tensor grad, Tensor x, Tensor mean, Tensor scale, Tensor? y=None) -> (Tensor, Tensor)"
)
operations: Any = torch.ops.mural
kernels: Any = triton_kernels


def fast(*tensors: Tensor) -> bool:
    """Whether these kernels serve tensors: of one shape, channels last, on a GPU."""
    first = tensors[0]
    form = CHANNELS_LAST.get(first.ndim)
    if form is None or not first.is_cuda or first.dtype not in NARROW or not first.numel():
        return False
    same = all(t.dtype == first.dtype and t.is_contiguous(memory_format=form) for t in tensors)
    return same and first.shape[1] > 1 and compiles(first.device)


@cache
def compiles(device: torch.device) -> bool:
    """Whether Triton makes kernels for a device: it needs a compiler at hand."""
    if triton_kernels is None:
        return False
    one = torch.ones(1, 2, 1, 1, device=device).to(memory_format=torch.channels_last)
    row = torch.ones(2, device=device)
    try:
        return bool(affine_on_gpu(one, row, row, row).eq(1).all())
    except Exception:  # whatever is missing
        return False


# -- plain torch -------------------------------------------------------------------------------------------------------


def rows_of(x: Tensor) -> Tensor:
    """Positions and channels: (rows, C), without a copy if channels are last."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def affine_on_cpu(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, relu: bool = False) -> Tensor:
    """(x − mean) · scale + shift."""
    shape = (1, -1, *(1,) * (x.ndim - 2))
    found = ((x - mean.view(shape)) * scale.view(shape) + shift.view(shape)).to(x.dtype)
    return found.relu() if relu else found


def moments_on_cpu(x: Tensor) -> Tensor:
    """One part: all rows."""
    rows = rows_of(x).to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(rows, 0, correction=0)
    return torch.stack([torch.full_like(mean, len(rows)), mean, variance * len(rows)])[None]


def gradients_on_cpu(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a gradient is times the scale, and the two sums."""
    grad = grad if y is None else torch.where(y <= 0, 0, grad)
    rows, values = rows_of(grad).to(mean.dtype), rows_of(x).to(mean.dtype)
    of_x = (grad * scale.view(1, -1, *(1,) * (x.ndim - 2))).to(x.dtype)
    return of_x, torch.stack([rows.sum(0), (rows * (values - mean)).sum(0)])


# -- Triton ------------------------------------------------------------------------------------------------------------


def affine_on_gpu(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, relu: bool = False) -> Tensor:
    """(x − mean) · scale + shift."""
    check_rows(x)
    mean, scale, shift = map(as_vector, (mean, scale, shift))
    y, channels, rows = torch.empty_like(x), x.shape[1], x.numel() // x.shape[1]
    columns = columns_of(channels)
    some = AT_ONCE // columns
    with torch.cuda.device(x.device):
        kernels.affine[(-(-rows // some), -(-channels // columns))](
            x, mean, scale, shift, y, rows, channels, RELU=relu, ROWS=some, COLUMNS=columns
        )
    return y


def moments_on_gpu(x: Tensor) -> Tensor:
    """The moments of parts of the rows."""
    check_rows(x)
    parts, each, columns = divided(x)
    found = x.new_empty(parts, 3, x.shape[1], dtype=torch.float32)
    with torch.cuda.device(x.device):
        kernels.moments[(parts, -(-x.shape[1] // columns))](
            x, found, x.numel() // x.shape[1], each, x.shape[1], ROWS=AT_ONCE // columns, COLUMNS=columns
        )
    return found


def gradients_on_gpu(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a gradient is times the scale, and the two sums."""
    if grad.stride() != x.stride():
        grad = torch.empty_like(x).copy_(grad)
    check_rows(grad, x, *(() if y is None else (y,)))
    mean, scale = map(as_vector, (mean, scale))
    parts, each, columns = divided(x)
    of_x, found = torch.empty_like(x), x.new_empty(parts, 2, x.shape[1], dtype=torch.float32)
    with torch.cuda.device(x.device):
        kernels.gradients[(parts, -(-x.shape[1] // columns))](
            grad, x, mean, scale, x if y is None else y, of_x, found, x.numel() // x.shape[1], each, x.shape[1],
            RELU=y is not None, ROWS=AT_ONCE // columns, COLUMNS=columns,
        )  # fmt: skip
    return of_x, found.sum(0)


def check_rows(*tensors: Tensor) -> None:
    """Raise unless tensors have one shape, and their channels last: kernels count positions in memory."""
    form = CHANNELS_LAST.get(tensors[0].ndim)
    same = all(t.shape == tensors[0].shape for t in tensors)
    if form is None or not same or not all(t.is_contiguous(memory_format=form) for t in tensors):
        shapes = [(tuple(t.shape), t.stride()) for t in tensors]
        raise LayoutError(f"shapes and strides {shapes}: these kernels take channels-last tensors of one shape")


def as_vector(values: Tensor) -> Tensor:
    """A number for each channel, as kernels read them."""
    return values.to(torch.float32).contiguous()


def columns_of(channels: int) -> int:
    """How many channels a program takes."""
    return min(64, 1 << (channels - 1).bit_length())


def divided(x: Tensor) -> tuple[int, int, int]:
    """How many parts the rows have, how many rows each of them, and how many channels a program takes.

    It depends on the shape alone, so that sums are the same to the bit when a step is repeated.

    >>> divided(torch.empty(1, 64, 512, 8192, device="meta")), divided(torch.empty(1, 3, 8, 8, device="meta"))
    ((2048, 2048, 64), (1, 1024, 4))
    """
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    columns = columns_of(channels)
    step = AT_ONCE // columns
    each = max(1, rows * -(-channels // columns) // (PROGRAMS * step)) * step
    return -(-rows // each), each, columns


for name, on_cpu, on_gpu in (
    ("channel_affine", affine_on_cpu, affine_on_gpu),
    ("channel_moments", moments_on_cpu, moments_on_gpu),
    ("channel_gradients", gradients_on_cpu, gradients_on_gpu),
):
    library.impl(name, on_cpu, "CPU")
    library.impl(name, on_gpu, "CUDA")
