"""Calls without memory: tensors that stand in for others on meta, arguments that leave them there, hidden writes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

META = torch.device("meta")
MOVES = frozenset(["cpu", "cuda", "pin_memory"])
"""The calls that do nothing but move a tensor to other memory."""


def twin_of(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and kind, without memory."""
    twin = torch.empty_like(tensor, device=META, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def staying(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call, without its wish for another device: `.to("cuda")` stays on meta."""
    if name != "to":
        return args
    return tuple(META if isinstance(a, (torch.device, str)) or type(a) is int else a for a in args)


def staying_named(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same for keyword arguments; numbers without memory have no generator either."""
    kept = {k: v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}
    return kept | {"device": META} if kept.get("device") is not None else kept


def statistics_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The running statistics that a norm writes: with memory they would count the write, on meta they do not."""
    if func not in (F.batch_norm, F.instance_norm):
        return []
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    writes = given.get("training", False) or given.get("use_input_stats", False)
    return [given[name] for name in ("running_mean", "running_var") if writes and given[name] is not None]
