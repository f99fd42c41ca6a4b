"""Blocks with gradients of their own making: custom functions, and hooks on modules, activations and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from live_blocks import CHANNELS, Block, mixer
from torch import Tensor, nn
from torch.nn import functional as F


class Bent(torch.autograd.Function):
    """A tanh whose gradient is not tanh's: what ignores this backward gives other weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y) * 1.3


class Rounded(torch.autograd.Function):
    """Rounded to eighths, with the gradient of no rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Times(torch.autograd.Function):
    """An activation times a weight for each channel, with both gradients by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 2, 3), keepdim=True)


class FunctionOnActivations(Block):
    def change(self, x: Tensor) -> Tensor:
        return Bent.apply(x)


class FunctionOnWeights(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, Rounded.apply(self.mix.weight), self.mix.bias)


class FunctionOnBoth(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(1, CHANNELS, 1, 1))

    def change(self, x: Tensor) -> Tensor:
        return Times.apply(x, self.gain)


class FunctionInChild(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(mixer(3), FunctionOnActivations(), nn.Sequential(FunctionOnWeights(), nn.Tanh()))

    def change(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


# ------------------------------------------------------------------------------------------------------------- hooks


def enlarge(module: nn.Module, given: Any, made: Tensor) -> Tensor:
    return made * 1.2


def reduce(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return (given[0] * 0.8,)


def halve(module: nn.Module, inward: tuple[Tensor | None, ...], outward: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else grad * 0.5 for grad in inward)


class ForwardHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix.register_forward_hook(enlarge)


class PreHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix.register_forward_pre_hook(reduce)


class BackwardHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix.register_full_backward_hook(halve)


class TensorHook(Block):
    def change(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: (grad * 0.5).clamp(-0.1, 0.1))
        return x.tanh()


class WeightHook(Block):
    """A hook on a parameter that doubles its gradient: linear, so that parts may be doubled one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.mix.weight.register_hook(lambda grad: grad * 2)


class WeightClip(Block):
    """A hook on a parameter that clips its gradient: the sum of clipped parts is not the clipped sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mix.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


GRADIENTS: dict[str, Callable[[], Block]] = {
    "function": FunctionOnActivations,
    "function_weight": FunctionOnWeights,
    "function_both": FunctionOnBoth,
    "function_child": FunctionInChild,
    "hook": ForwardHook,
    "pre_hook": PreHook,
    "backward_hook": BackwardHook,
    "tensor_hook": TensorHook,
    "weight_hook": WeightHook,
}
