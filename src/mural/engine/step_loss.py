"""The loss of one step, called for each micro-batch: what its modules hold counts as of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mural.engine.loss_variables import held_by
from mural.graph.commons import Commons, Name
from mural.graph.held import HeldState
from mural.pipeline.step_runs import check_left


class StepLoss:
    """A loss that may be called several times in a step; each call finds what the first one found.

    Where calls leave something else in an attribute or a buffer of the loss, `PlanError` names it.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], function: Callable[..., Any], model: nn.Module):
        self.loss = loss
        own = {id(module) for module in model.modules()}
        found = [(".".join(map(str, path)), value) for path, value in held_by(function)]
        modules = {
            f"loss{'.' if path else ''}{path}{'.' if inner else ''}{inner}": module
            for path, value in found
            if isinstance(value, nn.Module)
            for inner, module in value.named_modules()
            if id(module) not in own
        }
        self.held = HeldState.by(modules) if modules else None
        self.left: dict[Name, Any] | None = None
        self.commons: Commons | None = None
        """What modules have in common when the first call begins, after the forward of its micro-batch."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss."""
        held = self.held
        self.commons = self.commons or Commons.of(() if held is None else held.modules.values())
        if held is not None:
            held.put_back()
        self.commons.put_back()
        value = self.loss(output, target)
        if held is None:
            return value
        changes = held.changes()
        self.left = changes if self.left is None else self.left
        check_left(self.left, changes)
        return value
