"""Parts of tensors, cut out and put into larger ones, with gradients.

torch copies a part of a tensor one number at a time, in half precision at an eighth of the speed of a GPU's memory. On
channels-last tensors, a part is made of whole positions, so it can be copied 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.comm.exchange import CHANNELS_LAST, empty_like, order_of

WIDE = torch.complex128
"""A type of 16 bytes."""
LEAST = 2**19
"""Bytes from which on a copy is worth a few calls more."""
Part = tuple[slice, ...]


def wide(tensor: Tensor) -> Tensor | None:
    """The same memory as numbers of 16 bytes, channels in the last dim; None if they do not fit."""
    size, last = tensor.element_size(), tensor.movedim(1, -1)
    starts = (tensor.storage_offset(), last.shape[-1], *last.stride()[:-1])
    fits = last.stride(-1) == 1 and not any(start * size % WIDE.itemsize for start in starts)
    return last.view(WIDE) if fits and size < WIDE.itemsize else None


def worth_it(tensor: Tensor) -> bool:
    """Whether copies of a tensor's parts are faster by 16 bytes: on a GPU, or on one without memory."""
    return (
        tensor.device.type in ("cuda", "meta")
        and tensor.numel() * tensor.element_size() >= LEAST
        and CHANNELS_LAST.get(tensor.ndim) == order_of(tensor)
    )


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy all numbers of a tensor into a part of another, or the other way."""
    if worth_it(target) and worth_it(source) and target.dtype == source.dtype:
        into, of = wide(target), wide(source)
        if into is not None and of is not None:
            target, source = into, of
    target.copy_(source)


class _CutOut(torch.autograd.Function):
    """A dense part of a tensor; its backward fills one tensor with zeros around the gradient.

    It never gives a view: torch refuses to write in place to one that a custom Function made.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part) -> Tensor:
        ctx.part, ctx.shape = part, x.shape
        return plain_part(x, part, True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return filled_around(grad, ctx.part, ctx.shape, 0.0), None


class _PutInto(torch.autograd.Function):
    """A tensor with a constant around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part, shape: Sequence[int], value: float) -> Tensor:
        ctx.part = part
        return filled_around(x, part, shape, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return plain_part(grad, ctx.part, True), None, None, None


def copies_fast(part: Tensor) -> bool:
    """Whether a part of a tensor is worth a dense copy."""
    return worth_it(part) and not part.is_contiguous(memory_format=order_of(part))


def plain_part(x: Tensor, part: Part, dense: bool) -> Tensor:
    """A part of a tensor; dense, if it is to be and that is fast."""
    found = x[part]
    if not dense or not copies_fast(found):
        return found
    made = empty_like(x, found.shape)
    copy_into(made, found)
    return made


def filled_around(x: Tensor, part: Part, shape: Sequence[int], value: float) -> Tensor:
    """A tensor of that shape, of which a part is given, and the rest is one value."""
    whole = empty_like(x, shape).fill_(value) if value else empty_like(x, shape).zero_()
    copy_into(whole[part], x)
    return whole


def cut_out(x: Tensor, part: Part, dense: bool = True) -> Tensor:
    """A part of a tensor; the tensor itself if that is all of it. Not `dense`: a view."""
    if all(s.start == 0 and s.stop == n for s, n in zip(part, x.shape, strict=True)):
        return x
    if dense and x.requires_grad and torch.is_grad_enabled() and copies_fast(x[part]):
        made: Tensor = _CutOut.apply(x, part)  # type: ignore[assignment]
        return made
    return plain_part(x, part, dense)


def padded(x: Tensor, amounts: Sequence[int], value: float, fast: bool) -> Tensor:
    """A tensor with so many numbers of that value before and after it, from the last dim on; `fast` takes no second
    derivative.
    """
    if not fast or not worth_it(x):
        return F.pad(x, list(amounts), value=value)
    lead = (0,) * (x.ndim - len(amounts) // 2)
    before, after = ((*lead, *reversed(amounts[side::2])) for side in (0, 1))
    part = tuple(slice(a, a + n) for a, n in zip(before, x.shape, strict=True))
    shape = [a + n + b for a, n, b in zip(before, x.shape, after, strict=True)]
    if not x.requires_grad or not torch.is_grad_enabled():
        return filled_around(x, part, shape, value)
    made: Tensor = _PutInto.apply(x, part, shape, value)  # type: ignore[assignment]
    return made
