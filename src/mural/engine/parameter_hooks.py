"""What modules do to their parameters and buffers besides computing: hooks on gradients, buffers rebound.

A hook sees parts of a gradient, which is exact for those that are linear. A buffer may be rebound, as by
`self.average = 0.9 * self.average + 0.1 * x.mean((0, 2, 3))`: what a reduction over a sharded tensor gives is whole on
every rank, but still a sharded tensor. As a buffer it becomes the plain tensor that it is on one device: state dicts
hold it, and its owner reads it between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mural.errors import PlanError
from mural.shard import ShardedTensor


def check_hooks(model: nn.Module, known: dict[int, Any]) -> None:
    """Raise for a hook that changes a gradient and is not linear, as a clip; `known` are those that were looked at.

    The gradient of a parameter is a sum over ranks and micro-batches, and a hook is called with each part of it. A mask
    or a scale gives the same in the end. Each hook is called three times with random numbers to find out.
    """
    for name, parameter in model.named_parameters():
        for hook in (parameter._backward_hooks or {}).values():
            if id(hook) not in known:
                known[id(hook)] = hook  # held, so that no other gets its number
                if not linear(hook, parameter):
                    raise PlanError(
                        f"a hook changes the gradient of {name}, and is not linear: it would be called with parts of "
                        f"the gradient, of ranks or micro-batches, and not with the whole. Change .grad after pm.step "
                        f"instead, as by pm.clip_grad_norm_"
                    )


def check_called(model: nn.Module) -> None:
    """Raise for hooks of modules that nobody would call: a streamed step makes a module's calls without the module."""
    named = [n or "the model" for n, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    if named:
        raise PlanError(
            f"{named[:3]} have backward hooks, and a streamed step makes the calls of modules without them: remove "
            f"them, and use .grad after pm.step"
        )


def linear(hook: Callable[[Tensor], Any], parameter: Tensor) -> bool:
    """Whether a hook gives for a sum what it gives for the parts, added up."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 100 for _ in range(2))
    one, other = (part.to(parameter.device, parameter.dtype) for part in (one, other))
    with torch.no_grad():
        of_one, of_other, of_both = (hook(part.clone()) for part in (one, other, one + other))
    if of_both is None:
        return True
    size = max(float(found.abs().max()) for found in (of_one, of_other, of_both)) if of_both.numel() else 0.0
    return torch.allclose(of_both, of_one + of_other, rtol=0.0, atol=1e-3 * size)


def make_plain(modules: Iterable[nn.Module]) -> None:
    """Let buffers that no axis cuts be plain tensors."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if isinstance(buffer, ShardedTensor) and not buffer.placement.cut_dims and not buffer.folds:
                module._buffers[name] = buffer.local
