"""Tensors without memory: what a stage sees of another stage's tensors, and calls on meta tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mural.errors import PlanError
from mural.graph.script import Key


class AbsentValue(PlanError):
    """A call that needs the values of another stage's tensor."""


class Absent(Tensor):
    """A tensor of the graph that is not here; `key` says which, after a write in place the next version of it."""

    key: Key

    @staticmethod
    def __new__(
        cls: type[Absent], key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device, gradient: bool
    ) -> Absent:
        made: Absent = Tensor._make_wrapper_subclass(  # type: ignore[assignment]
            cls, tuple(shape), dtype=dtype, device=device, requires_grad=gradient
        )
        made.key = key
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise AbsentValue(
            f"{func} reads the result of another stage, which was not sent here: the model passes it in a way that "
            f"cannot be seen (inside an object, a closure or a hook). Move the cut so that both are in one stage"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({self.key}, shape={tuple(self.shape)})"


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
    """The arguments of a call, without a request for another device: `.to("cuda")` stays on meta."""
    if name != "to":
        return args
    return tuple(META if isinstance(a, (torch.device, str)) or type(a) is int else a for a in args)


def staying_named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same for keyword arguments; numbers without memory have no generator either.

    Of all functions that make tensors, `torch.normal` alone does not ask the device of a `with` block.
    """
    kept = {k: v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}
    makes = name == "normal" and not any(isinstance(item, Tensor) for item in (*args, *kwargs.values()))
    return kept | {"device": META} if makes or kept.get("device") is not None else kept


def statistics_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The running statistics that a norm writes: with memory they would count the write, on meta they do not."""
    if func not in (F.batch_norm, F.instance_norm):
        return []
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    writes = given.get("training", False) or given.get("use_input_stats", False)
    return [given[name] for name in ("running_mean", "running_var") if writes and given[name] is not None]
