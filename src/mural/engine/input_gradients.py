"""Gradients of a step's inputs: true ones on every rank, also where an input was computed from something else."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.engine.held_model import HeldModel
from mural.errors import PlanError
from mural.shard import ShardedTensor


class InputGradients:
    """The inputs of one step with leaves in place of those that require a gradient; `hand_back` gives it to these.

    A step in several parts goes backward several times, and a graph before its inputs would not last.
    """

    def __init__(self, held: HeldModel, image: Any, target: Any):
        self.held = held
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.image, self.target = pytree.tree_map(self._leaf, (image, target))

    def _leaf(self, given: Any) -> Any:
        if not isinstance(given, Tensor) or not given.requires_grad:
            return given
        if isinstance(given, ShardedTensor) and not self.held.stage_ranks.alone:
            raise PlanError(
                f"an input of shape {tuple(given.shape)} is a sharded tensor that requires a gradient, which only the "
                f"ranks of the stages that read it would get: give the whole tensor on every rank, or detach() it"
            )
        leaf = given.detach().requires_grad_()
        self.pairs.append((given, leaf))
        return leaf

    def hand_back(self) -> None:
        """Go backward through what the inputs were computed from. Collective where ranks run different stages."""
        if not self.pairs:
            return
        grads = [leaf.grad if self.held.stage_ranks.alone else self._of_all_stages(leaf) for _, leaf in self.pairs]
        found = [(given, grad) for (given, _), grad in zip(self.pairs, grads, strict=True) if grad is not None]
        for given, grad in found:
            if isinstance(given, ShardedTensor):
                given.backward(grad, retain_graph=True)
        plain = [(given, grad) for given, grad in found if not isinstance(given, ShardedTensor)]
        if plain:
            torch.autograd.backward([given for given, _ in plain], [grad for _, grad in plain])

    def _of_all_stages(self, leaf: Tensor) -> Tensor:
        """The sum of the gradients of all stages, each of which all of its ranks have."""
        transport, grad = self.held.world_mesh.transport, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        total = transport.outbound(grad / self.held.mesh.world)
        with transport.meeting("gradients of the inputs"):
            dist.all_reduce(total, group=transport.group)
        return total.to(grad.device)


def check_alone(held: HeldModel, image: Any, target: Any) -> None:
    """Raise for an input that requires a gradient where each data rank trains alone, with a loss of its own."""
    if held.span.parts > 1 and any(
        isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves((image, target))
    ):
        raise PlanError(
            f"an input requires a gradient, but with average = {held.plan.average} each data rank has a loss of its "
            f"own: detach() the input, or leave out average"
        )
