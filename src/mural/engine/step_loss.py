"""The loss of one step, called for each micro-batch: what its modules hold counts as of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mural.engine.loss_variables import held_by
from mural.graph.held import Held, Name
from mural.pipeline.runs import DRAWS, check_left


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
        self.held = Held.by(modules) if modules else None
        self.left: dict[Name, Any] | None = None
        self.draws: Held | None = None
        """What Python's own generators were when the first call began, after the forward of its micro-batch."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss."""
        self.draws = self.draws or Held.by({})
        if self.held is not None:
            self.held.put_back()
        self.draws.put_back()
        value = self.loss(output, target)
        if self.held is None:
            return value
        changes = {name: left for name, left in self.held.changes().items() if name not in DRAWS}
        self.left = changes if self.left is None else self.left
        check_left(self.left, changes)
        return value
