"""One device: plain autograd with the calls of a parallel model, and a first trial of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mural.check.copies import copied
from mural.check.leaves import leaves
from mural.engine import Loss
from mural.engine.inputs import shape_of
from mural.engine.loss_terms import LossTerms
from mural.engine.materialize import unwrapped
from mural.engine.microbatches import part_of, rows_of
from mural.pipeline.loss_parts import joined_results
from mural.plans import Plan
from mural.shard.generators import random_state

MODEL, LOSS = "the model", "the loss"
PACE = 0.001
"""How far an update moves the parameters, relative to them; it lowers the loss by at most ten times as much."""


class PlainModel:
    """A model on one device, with the calls of `Parallel` that a step needs.

    Where the plan lets BatchNorm look at each micro-batch alone, it does so here too; the loss is the whole batch's.
    """

    def __init__(self, model: nn.Module, plan: Plan, loss: Loss):
        self.model, self.plan, self.loss = model, plan, loss
        self.terms = LossTerms.of(loss, unwrapped(model))
        self.observe: Callable[[Any], None] | None = None

    def step(self, image: Any, target: Any) -> Tensor:
        """The loss, after forward and backward."""
        parts = rows_of(shape_of(image)[0], self.plan.microbatches if self.plan.norms_apart else 1)
        with self.scope():
            given = (part_of(image, rows) for rows in parts)
            outputs = [self.model(*(x if isinstance(x, tuple) else (x,))) for x in given]
            dims = tuple(0 if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(outputs[0]))
            output = joined_results(outputs, dims)
            if self.observe is not None:
                self.observe(output)
            value = self.loss(output, target)
        value.backward()
        return value.detach()

    def scope(self) -> AbstractContextManager[Any]:
        """The plan's precision."""
        if self.plan.precision != "bfloat16":
            return nullcontext()
        return torch.autocast(device_of(self.model).type, torch.bfloat16)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, the loss's too."""
        return chain(unwrapped(self.model).named_parameters(), self.terms.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers, the loss's too."""
        return chain(unwrapped(self.model).named_buffers(), self.terms.named_buffers())

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad()
        self.terms.zero_grad()

    def updated(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Called after each update, as for a plan."""


@dataclass(frozen=True)
class FirstStep:
    """What a first step on one device shows."""

    drawing: tuple[str, ...]
    """The modules that draw random numbers, MODEL and LOSS among them."""
    rate: float
    """The learning rate of updates that keep the model sane; 0 where the loss or a gradient is not finite."""
    eps: float
    """The relative distance of neighbouring numbers in the coarsest type of results and parameters."""


def trial(model: nn.Module, plan: Plan, loss: Loss, image: Any, target: Any) -> FirstStep:
    """What the first step of a copy of the model shows."""
    model, loss = copied(model, loss)
    plain, outputs = PlainModel(model, plan, loss), list[Any]()
    plain.observe = outputs.append
    with watching_draws(plain.model) as drawing:
        value = float(plain.step(image, target).abs())
    trained = [p for _, p in plain.named_parameters() if p.grad is not None]
    slope = total(p.grad for p in trained)
    rates = [PACE * total(trained) / slope, 10 * PACE * value / slope**2] if slope else []
    rate = min((r for r in rates if r), default=PACE)
    values = [*(leaf for _, leaf in leaves(outputs[0])), *(p for _, p in plain.named_parameters())]
    kinds = [value.dtype for value in values if isinstance(value, Tensor)]
    kinds += [torch.bfloat16] if plan.precision == "bfloat16" else []
    eps = max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=0.0)
    return FirstStep(tuple(drawing), rate if isfinite(value) and isfinite(slope) else 0.0, eps)


def total(tensors: Iterable[Tensor | None]) -> float:
    """The norm of all these tensors as one vector."""
    norms = [torch.linalg.vector_norm(t.detach(), dtype=wide(t)) for t in tensors if t is not None]
    return float(torch.linalg.vector_norm(torch.stack([n.cpu() for n in norms]))) if norms else 0.0


def wide(tensor: Tensor) -> torch.dtype:
    """The type of double precision for a tensor's norm."""
    return torch.complex128 if tensor.is_complex() else torch.float64


@contextmanager
def watching_draws(model: nn.Module) -> Generator[list[str]]:
    """The names of the modules that draw random numbers themselves inside the block, in order."""
    found, running = list[str](), [""]
    device = device_of(model)
    state = random_state(device)

    def note() -> None:
        nonlocal state
        before, state = state, random_state(device)
        if not torch.equal(before, state) and running[-1] not in found:
            found.append(running[-1])

    def enter(name: str, *_: Any) -> None:
        note()
        running.append(name)

    def leave(*_: Any) -> None:
        note()
        running.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, name or MODEL)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        running[0], state = LOSS, random_state(device)
        yield found
        note()


def quiet(model: nn.Module, loss: Loss, drawing: Sequence[str]) -> tuple[nn.Module, Loss]:
    """A copy of model and loss; modules that draw are in evaluation mode, and those inside them are not."""
    silent, copy = copied(model, loss)
    for name in drawing:
        if name != LOSS:
            silent.get_submodule("" if name == MODEL else name).training = False
    return silent, copy


def device_of(model: nn.Module) -> torch.device:
    """Where a model is."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
