"""The module that a user gives: inside `torch.compile`, or on the meta device without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mural.errors import PlanError


def unwrapped(model: nn.Module) -> nn.Module:
    """The model whose names count: the one inside `torch.compile`."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def uncompiled(function: Any) -> Any:
    """The function or module that was given to `torch.compile`, or the value itself."""
    if isinstance(function, nn.Module):
        return unwrapped(function)
    return getattr(function, "_torchdynamo_orig_callable", function)


def materialize(model: nn.Module, device: torch.device | str | None, what: str = "the model") -> None:
    """Move the model to a device (None: where it is); what is on meta gets memory and is reset.

    A module that keeps tensors on meta and has no `reset_parameters` cannot be given values, and raises.
    """
    if lazy := next((name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)), None):
        raise PlanError(f"{lazy} has no shape yet: run {what} once on an image before, so that its lazy layers get one")
    bare = [
        (name, m)
        for name, m in model.named_modules()
        if any(t.is_meta for t in (*m.parameters(False), *m.buffers(False)))
    ]
    if not bare:
        if device is not None:
            model.to(device)
        return
    unable = [name or type(m).__name__ for name, m in bare if not callable(getattr(m, "reset_parameters", None))]
    if unable:
        raise PlanError(
            f"{what} is on the meta device, and {', '.join(unable[:5])} hold tensors but have no reset_parameters() "
            f"that would give them values: give them one, or build {what} on the CPU"
        )
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    target = torch.device(device)
    give_memory(model, target)
    model.to(target)
    for _, module in bare:
        resetting: Any = module
        resetting.reset_parameters()


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Memory for tensors on meta; what was one tensor under several names stays one."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    empty, trains = torch.empty_like(tensor, device=device), tensor.requires_grad
                    made[id(tensor)] = nn.Parameter(empty, trains) if isinstance(tensor, nn.Parameter) else empty
                held[key] = made[id(tensor)]  # type: ignore[assignment]
