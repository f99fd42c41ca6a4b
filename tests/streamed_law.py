"""The law of streaming: a step in tiles equals the step of the plain model, in float64 to 1e-10."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mural
from law import image
from mural.memory.choice import Room, Speeds
from streamed_losses import LOSSES, target_for
from streamed_models import CLASSES, Spec

TOLERANCE = 1e-10
FLOOR = 1e-3
"""A gradient that should be 0 may differ by that part of the tolerance of the largest of all gradients."""

Loss = Callable[[Any, Any], Tensor]
Batch = tuple[Tensor, Any]


def apart(found: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    """The largest difference relative to the largest entry, or to the floor if that is larger."""
    if found is None or expected is None:
        given = found if expected is None else expected  # no gradient, or a gradient of zeros
        return 0.0 if given is None or not bool(given.any()) else float("inf")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.numel():
        return 0.0
    a, b = (x.detach().cpu().double() for x in (found, expected))
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros_like(a), (a - b).abs()).max()
    sizes = b[b.isfinite()].abs()
    scale = max(float(sizes.max()) if sizes.numel() else 0.0, floor, 1e-12)
    return float(gap) / scale


def parameters_of(model: nn.Module, loss: Loss) -> dict[str, nn.Parameter]:
    """The parameters of model and loss, by the names that a parallel model gives them."""
    found = dict(model.named_parameters())
    if isinstance(loss, nn.Module):
        found |= {f"loss.{name}": p for name, p in loss.named_parameters()}
    return found


def differences(pm: Any, model: nn.Module, loss: Loss, inputs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """How far gradients and buffers are apart; `inputs` are pairs of an input's gradients, found and expected."""
    expected = parameters_of(model, loss)
    sizes = [p.grad.nan_to_num(0.0).abs().max() for p in expected.values() if p.grad is not None]
    largest = max(map(float, sizes), default=0.0)
    # The loss's own parameters may be named otherwise.
    pairs = zip(expected.items(), pm.named_parameters(), strict=True)
    found = {f"gradient of {name}": apart(q.grad, p.grad, FLOOR * largest) for (name, p), (_, q) in pairs}
    buffers = zip(model.named_buffers(), pm.named_buffers(), strict=False)
    found |= {f"buffer {name}": apart(b, a, FLOOR) for (name, a), (_, b) in buffers}
    for number, (got, want) in enumerate(inputs):
        found[f"gradient of input {number}"] = apart(got, want, 0.01 * FLOOR * largest)
    return found


def streamed(model: nn.Module, loss: Loss, plan: mural.Plan, keep: str | None) -> Any:
    """A copy of the model under a plan that streams.

    Values between passes are kept as the plan chooses (None), or "all" or "none" of them, or all of them on the "host".
    """
    pm = mural.parallelize(deepcopy(model), plan, deepcopy(loss) if isinstance(loss, nn.Module) else loss)
    if keep == "host":
        pm.way._room = lambda: Room(0, 2**40, 8, Speeds(link=1e18), bands=4000)
    else:
        pm.way.keep = keep
    return pm


def wrong(found: dict[str, float]) -> dict[str, float]:
    """What is further apart than the law allows."""
    return {name: value for name, value in found.items() if not value <= TOLERANCE}


def check_steps(
    model: nn.Module, loss: Loss, batches: Sequence[Batch], plan: mural.Plan, keep: str | None = None,
    weights: Sequence[float] = (1.0, 1.0), accumulate: bool = False,
) -> None:  # fmt: skip
    """Check steps in a row, with an update of the weights after each, or with gradients that add up."""
    pm = streamed(model, loss, plan, keep)
    plain, plain_loss = deepcopy(model), deepcopy(loss) if isinstance(loss, nn.Module) else loss
    for number, ((x, target), weight) in enumerate(zip(batches, weights, strict=False)):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = plain_loss(plain(theirs), target)
        (expected * weight).backward()
        got = pm.step(ours, target, reduce=not accumulate or number == len(batches) - 1, weight=weight)
        found = {"loss": apart(got, expected)}
        found |= differences(pm, plain, plain_loss, [(ours.grad, theirs.grad)])
        assert not wrong(found), f"step {number}: {wrong(found)}"
        if accumulate:
            continue
        pairs = zip(parameters_of(plain, plain_loss).values(), pm.parameters(), strict=True)
        for p, q in pairs:
            with torch.no_grad():
                for one in (p, q):
                    if one.grad is not None:
                        one.sub_(one.grad, alpha=0.01 / max(1.0, float(expected.abs())))
                    one.grad = None


def images(count: int, extents: Sequence[int], number: int = 2) -> list[Tensor]:
    """Some batches of images with 2 channels."""
    return [image(count, 2, *extents, seed=3 + n) for n in range(number)]


@dataclass(frozen=True)
class Case:
    """A model, a loss, images and how they are streamed."""

    spec: Spec
    extents: tuple[int, ...]
    tile: tuple[int, ...]
    loss: str = "cross entropy"
    ignored: str = ""
    count: int = 1
    keep: str | None = None
    weights: tuple[float, ...] = (1.0, 1.0)
    accumulate: bool = False

    def check(self) -> None:
        """Check the law."""
        shape = (self.count, CLASSES, *(self.extents if self.spec.head == "pixels" else ()))
        batches = images(self.count, self.extents, len(self.weights))
        given = [(x, target_for(self.loss, shape, self.ignored, seed)) for seed, x in enumerate(batches)]
        check_steps(
            self.spec.build(), LOSSES[self.loss], given, mural.Plan(stream=self.tile), self.keep, self.weights,
            self.accumulate,
        )  # fmt: skip
