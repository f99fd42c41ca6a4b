"""1 × 1 convolutions with few outputs, as heads of segmentation are: their input's gradient as a matrix product.

cuDNN's kernel for two to four outputs in half precision takes 10.5 ms for 64 channels × 4 M positions on an H200, the
product 0.4 ms: as much as reading and writing them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FEW = range(2, 5)
"""Numbers of outputs for which there is no fast kernel."""
HALF = (torch.float16, torch.bfloat16)


class FewOutputs(torch.autograd.Function):
    """A 1 × 1 convolution without stride, padding and groups."""

    @staticmethod
    def forward(ctx: Any, conv: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What `conv` gives."""
        ctx.save_for_backward(x, weight)
        return conv(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The gradients of input, weight and bias."""
        (grad,), (x, weight) = grads, ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        of_x = torch.matmul(grad.movedim(1, -1), weight.flatten(1)).movedim(-1, 1) if wanted[0] else None
        ones, zeros = [1] * (x.ndim - 2), [0] * (x.ndim - 2)
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            grad, x, weight, [weight.shape[0]], ones, zeros, ones, False, zeros, 1, [False, wanted[1], wanted[2]]
        )
        return None, of_x, of_weight, of_bias


def pointwise(conv: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1 × 1 convolution without stride, padding and groups, whichever way is fast."""
    if not (x.is_cuda and weight.shape[0] in FEW and x.ndim == weight.ndim and torch.is_grad_enabled()):
        return conv(x, weight, bias)
    cast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if cast else x.dtype
    if dtype not in HALF:
        return conv(x, weight, bias)
    given = [tensor.to(dtype) if cast and tensor is not None else tensor for tensor in (x, weight, bias)]
    return FewOutputs.apply(conv, *given)
