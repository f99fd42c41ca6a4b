"""The guard of shares: a parameter that is split by channels is used only by its own layer.

A call on a share outside its layer, such as `F.linear(x, model.fc.weight)` or a penalty on the weights, would take the
share for the whole parameter, so it is refused. So is a step of an optimizer that needs the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from mural.channel.share import Share, share_of
from mural.errors import PlanError
from mural.shard.table import name_of

HARMLESS = frozenset(
    f"{name}.__get__"
    for name in (
        "dtype",
        "device",
        "requires_grad",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "layout",
        "ndim",
        "is_leaf",
        "grad",
    )
) | {"is_floating_point", "is_complex", "dim", "element_size", "__hash__"}
"""Attributes and calls whose result for a share is the same as for the whole parameter."""


WHOLE = tuple(getattr(optim, name) for name in ("Adafactor", "LBFGS", "Muon") if hasattr(optim, name))
"""Optimizers whose step depends on more than one value of a parameter."""


class ShareWatch(TorchFunctionMode):
    """In this block, a call on a share raises unless its layer makes it."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        share = found_in(args) or (found_in(kwargs.values()) if kwargs else None)
        if share is not None and name_of(func) not in HARMLESS:
            layer = share.name.rpartition(".")[0]
            raise PlanError(
                f"{name_of(func)} reads {share.name}, of which this rank holds only {[tuple(i) for i in share.box]}: "
                f"a layer that is split by channels is used by calling it; set channel_layers to a list without {layer}"
            )
        return func(*args, **(kwargs or {}))


def found_in(values: Iterable[Any]) -> Share | None:
    """A share among the arguments of a call."""
    for value in values:
        if type(value) is nn.Parameter:
            if (share := share_of(value)) is not None:
                return share
        elif isinstance(value, (tuple, list)) and (share := found_in(value)) is not None:
            return share
    return None


@cache
def watch_optimizers() -> None:
    """From now on, refuse steps on shares by optimizers that need the whole parameter."""
    register_optimizer_step_pre_hook(refuse_whole)


def refuse_whole(optimizer: optim.Optimizer, *_: Any) -> None:
    """Raise for an optimizer that would take a share for the whole parameter."""
    if isinstance(optimizer, WHOLE):
        share = found_in([p for group in optimizer.param_groups for p in group["params"]])
        if share is not None:
            raise PlanError(
                f"{type(optimizer).__name__} looks at {share.name} as a whole, but it is split by channels: use an "
                f"optimizer that works value by value, such as Adam or SGD, or set channel = 1"
            )
