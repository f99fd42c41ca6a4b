"""The kernels of `channel_kernels`, in Triton: a program computes a block of numbers, or of rows and channels."""
# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def affine(x, mean, scale, shift, y, rows, channels, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Shift and scale some channels of some rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = channel < channels
    inside = (row < rows)[:, None] & real[None, :]
    at = row[:, None] * channels + channel[None, :]
    middle, factor = tl.load(mean + channel, mask=real), tl.load(scale + channel, mask=real)
    values = tl.load(x + at, mask=inside).to(tl.float32)
    found = (values - middle[None, :]) * factor[None, :] + tl.load(shift + channel, mask=real)[None, :]
    if RELU:
        found = tl.where(found < 0, 0.0, found)  # what is no number stays so
    tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def moments(x, found, rows, each, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Merge the moments of `each` rows, some rows at a time."""
    first = tl.program_id(0).to(tl.int64) * each
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count, mean = 0.0, tl.zeros([COLUMNS], tl.float32)
    square = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (channel < channels)[None, :]
        values = tl.load(x + row[:, None] * channels + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        more = tl.sum((row < rows).to(tl.float32), 0)
        theirs = tl.sum(values, 0) / tl.maximum(more, 1.0)
        apart = tl.where(inside, values - theirs[None, :], 0.0)
        share = more / tl.maximum(count + more, 1.0)
        square += tl.sum(apart * apart, 0) + (theirs - mean) * (theirs - mean) * count * share
        mean += (theirs - mean) * share
        count += more
    target = found + tl.program_id(0) * 3 * channels + channel
    tl.store(target, tl.zeros([COLUMNS], tl.float32) + count, mask=channel < channels)
    tl.store(target + channels, mean, mask=channel < channels)
    tl.store(target + 2 * channels, square, mask=channel < channels)


@triton.jit
def gradients(
    grad, x, mean, scale, y, of_x, found, rows, each, channels, RELU: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scale the gradient, and add up two sums of `each` rows, some rows at a time; y is what an activation gave."""
    first = tl.program_id(0).to(tl.int64) * each
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    middle = tl.load(mean + channel, mask=channel < channels, other=0.0)
    factor = tl.load(scale + channel, mask=channel < channels, other=0.0)
    plain, with_x = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for start in range(0, each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (channel < channels)[None, :]
        at = row[:, None] * channels + channel[None, :]
        given = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            given = tl.where(tl.load(y + at, mask=inside, other=0.0) <= 0, 0.0, given)
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_x + at, (given * factor[None, :]).to(of_x.dtype.element_ty), mask=inside)
        plain += tl.sum(given, 0)
        with_x += tl.sum(given * (values - middle[None, :]), 0)
    target = found + tl.program_id(0) * 2 * channels + channel
    tl.store(target, plain, mask=channel < channels)
    tl.store(target + channels, with_x, mask=channel < channels)
