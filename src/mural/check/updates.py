"""Steps of a model with updates in between, and what each left: results, loss, gradients, parameters, buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mural.channel.share import Share, share_of
from mural.check.leaves import Gap, gap, leaves, matching
from mural.shard.in_time import Rows, current_rows

Name = tuple[str, str]
"""A kind of value and which one: ("gradient", "layer.3.weight")."""


class Stepping(Protocol):
    """What steps are taken with: a model under a plan, or on one device."""

    observe: Callable[[Any], None] | None

    def step(self, image: Any, target: Any) -> Tensor:
        """The loss, after forward and backward."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are here."""
        ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that are here."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...

    def updated(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Called after each update."""
        ...


class LeftValue(NamedTuple):
    """A value that a step left: whole, or what this rank holds of it."""

    name: Name
    value: Any
    rows: Rows | None = None
    share: Share | None = None

    def apart(self, whole: Any) -> Gap:
        """How far it is from the same part of the whole value."""
        if self.share is not None and isinstance(whole, Tensor):
            whole = self.share.cut(whole)
        return gap(*matching(self.value, whole, self.rows))


def steps(
    model: Stepping, image: Any, target: Any, count: int, rate: float, expected: Collection[Name] = (),
    observed: bool = True,
) -> Iterator[list[LeftValue]]:  # fmt: skip
    """What each of several steps leaves, with an update of plain gradient descent at the end of each.

    Of a parameter it is how far it moved since the beginning. A part of the results that is `expected` and not there
    is None; results count if they are `observed`.
    """
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = [p for _, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, rate) if trained else None
    for _ in range(count):
        results: list[tuple[Any, Rows | None]] = []
        if observed:
            model.observe = lambda result, results=results: results.append((result, current_rows()))
        loss = model.step(image, target)
        if optimizer is not None:
            optimizer.step()
        model.updated(optimizer)
        yield list(left(model, loss, results, start, expected))
        model.zero_grad()
    model.observe = None


def left(
    model: Stepping,
    loss: Tensor,
    results: Sequence[tuple[Any, Rows | None]],
    start: Mapping[str, Tensor],
    expected: Collection[Name],
) -> Iterator[LeftValue]:
    """What a step left."""
    yield LeftValue(("loss", ""), loss.detach().double().cpu())
    for result, rows in results:
        there = {("output", place): value for place, value in leaves(result)}
        missing = [name for name in expected if name[0] == "output" and name not in there]
        yield from (LeftValue(name, value, rows) for name, value in there.items())
        yield from (LeftValue(name, None, rows) for name in missing)
    for name, p in model.named_parameters():
        share = share_of(p)
        yield LeftValue(("gradient", name), p.grad, share=share)
        if p.requires_grad:
            yield LeftValue(("update", name), p.detach() - start[name], share=share)
    yield from (LeftValue(("buffer", name), buffer) for name, buffer in model.named_buffers())
