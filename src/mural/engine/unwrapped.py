"""What is inside of `torch.compile`: the module or function whose names count."""

from __future__ import annotations

from typing import Any

from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The model whose names count: the one inside of `torch.compile`."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def uncompiled(function: Any) -> Any:
    """The function or module that was given to `torch.compile`, or the value itself."""
    if isinstance(function, nn.Module):
        return unwrapped(function)
    return getattr(function, "_torchdynamo_orig_callable", function)
