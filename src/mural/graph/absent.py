"""Absent tensors: what a stage sees of tensors that another one has: shape, type and device, and no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mural.errors import PlanError
from mural.graph.script import Key


class AbsentValue(PlanError):
    """A call that needs the values of a tensor which another stage has."""


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
            f"cannot be seen (inside of an object, a closure or a hook). Move the cut so that both lie in one stage"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({self.key}, shape={tuple(self.shape)})"
