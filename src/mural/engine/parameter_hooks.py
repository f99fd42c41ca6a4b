"""Hooks on parameters' gradients: they see parts of a gradient, which is exact for those that are linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mural.errors import PlanError


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
