"""The updates of an offloaded model: which optimizers it has, and where their numbers have no room on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mural.errors import PlanError
from mural.memory.host_memory import HostMemory
from mural.memory.offload.dense_blocks import make_dense
from mural.memory.offload.hosted_updates import HostedUpdates, needed
from mural.memory.offload.moments import has_storage

TENSORS = 0.93
"""The part of a GPU's memory that tensors may take: torch's allocator reserves more than they do."""
LIVE: weakref.WeakSet[OffloadedUpdates] = weakref.WeakSet()
"""The updates of all offloaded models."""


class OffloadedUpdates:
    """The optimizers of a model, on a device whose memory has a `limit`; a method gives the model's `parameters`.

    Where `hosted`, numbers that have no room there rest on the host. Blocks of fewer than `least` bytes stay; smaller
    ones than `dense` are put together.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[nn.Parameter]],
        device: torch.device,
        limit: int | None,
        hosted: bool,
        least: int,
        dense: int,
    ):
        self.found = weakref.WeakMethod(parameters)  # the model ends with its last use, which this is not
        self.device, self.limit = device, limit
        self.hosted, self.least, self.dense = hosted, least, dense
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, HostedUpdates] = weakref.WeakKeyDictionary()
        self.running = False
        """Whether a step of the model runs."""
        listen()
        LIVE.add(self)

    def parameters(self) -> Sequence[nn.Parameter]:
        """The model's parameters; none once it is gone."""
        found = self.found()
        return () if found is None else found()

    @property
    def room(self) -> int | None:
        """The bytes that tensors may take."""
        return None if self.limit is None else int(TENSORS * self.limit)

    def numbers(self) -> list[Tensor]:
        """What all optimizers keep for the model's parameters."""
        return [tensor for optimizer in self.optimizers for tensor in self._numbers(optimizer)]

    def _numbers(self, optimizer: Optimizer) -> list[Tensor]:
        """What an optimizer keeps for the model's parameters, in their order; sparse tensors stay."""
        states = [optimizer.state[p] for p in self.parameters() if p in optimizer.state]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [tensor for tensor in tensors if tensor.ndim and has_storage(tensor)]

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer is about to update: other arguments for it, if its numbers may have no room on the device."""
        if self.running and self._are_mine(optimizer):
            raise PlanError(
                f"{type(optimizer).__name__}.step() was called while a step of the model ran, as from a hook of a "
                f"gradient: parameters, or what the optimizer keeps, may then be on the host. Call it after the step, "
                f'or leave "parameters" and "optimizer" out of offload'
            )
        if not self.hosted:
            return None
        if optimizer not in self.optimizers:
            if not self._are_mine(optimizer):
                return None
            self.optimizers[optimizer] = HostedUpdates(optimizer, HostMemory(self.device), self.least)
        updates = self.optimizers[optimizer]
        updates.chunked = False
        if self.limit is None:
            return None
        if updates.by_parameter:
            return updates.asked_within(lambda: self._left(optimizer), args, kwargs)
        self._check_room(optimizer)
        return None

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has updated."""
        updates = self.optimizers.get(optimizer)
        if updates is not None and not updates.chunked and updates.numbers != len(optimizer.state):
            updates.numbers = len(optimizer.state)
            make_dense((t for t in self._numbers(optimizer) if t.device == self.device), self.dense)

    def _are_mine(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer updates parameters of the model."""
        mine = {id(p) for p in self.parameters()}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def _check_room(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer that may not update in chunks has no room for its numbers."""
        if self._left(optimizer) is not None:
            enough = ceil(sum(needed(optimizer)) / TENSORS)
            raise PlanError(
                f"what {type(optimizer).__name__} keeps has no room within memory = {self.limit} bytes, and cannot "
                f"rest on the host: its step is not one of torch.optim's that update each parameter by itself. Set "
                f'memory = "{enough}", leave "optimizer" out of offload, or use an optimizer such as AdamW or SGD'
            )

    def _left(self, optimizer: Optimizer) -> int | None:
        """The bytes in which an update has to be done; None if there is room for all of the optimizer's numbers."""
        if self.room is None:
            return None
        fixed, numbers = needed(optimizer)
        if fixed + numbers <= self.room:
            return None
        if self.device.type == "cuda":
            fixed = torch.cuda.memory_allocated(self.device)
        return max(self.room - fixed, 1)


@cache
def listen() -> None:
    """Have torch tell of all updates, from now on.

    Hooks of each model would end with it, at any time: even while torch goes through its hooks.
    """
    register_optimizer_step_pre_hook(partial(told, "before"))
    register_optimizer_step_post_hook(partial(told, "after"))


def told(when: str, *given: Any) -> Any:
    """What models answer to an update: other arguments for it, or None."""
    answers = (getattr(updates, when)(*given) for updates in [*LIVE])
    return next((answer for answer in answers if answer is not None), None)
