"""Faults that strangers' cases found once, put back on purpose: what a plan made of a model, a loss or a step then."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from broken_plans import rule
from torch import Tensor, nn
from torch.nn import functional as F

from mural import Plan
from mural.check import compared_case, first_difference
from mural.engine import Parallel
from mural.engine.held_model import HeldModel

STREAM, SPATIAL, RECOMPUTE = Plan(stream=(16, 16)), Plan(spatial=(2, 1)), Plan(recompute=("first",))
TILES = 9
"""How many tiles small cases of these models have."""


class Probe(nn.Module):
    """A small network with one of the features that went wrong, which a fault changes under a plan."""

    def __init__(self, feature: str = "", fault: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)
        self.feature, self.fault = feature, fault

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        if self.feature == "hook" and not self.fault and y.requires_grad:
            y.register_hook(lambda grad: grad * 3)
        if self.feature == "write" and not self.fault:
            y = y * y.new_tensor([0.5, 1.0, 1.0, 0.5]).view(1, 4, 1, 1)  # what the write would have made of it
        y = torch.relu(self.norm(y))
        if self.feature == "draw":
            y = y + torch.normal(0.0, 0.5, y.shape, device=y.device, dtype=y.dtype)
        if self.feature == "gate":
            return self.head(y), y.mean((2, 3)).sigmoid()
        return self.head(y)


def entropy(result: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(result, target)


def gated(result: Any, target: Tensor, times: int = 1) -> Tensor:
    return F.cross_entropy(result[0], target) + 0.1 * times * result[1].mean()


def labelled(result: Any, target: Tensor, times: int = 1) -> Tensor:
    return F.cross_entropy(result, target[1]) + 0.01 * times * (target[0].to(result.dtype) ** 2).sum() * result.mean()


def huber(result: Any, target: Tensor, divided: float = 1.0) -> Tensor:
    return F.huber_loss(result, torch.zeros_like(result), weight=torch.full_like(result, 2.0)) / divided


def l1(result: Any, target: Tensor, weighted: bool = True) -> Tensor:
    weight = (target + 1).to(result.dtype).unsqueeze(1).expand_as(result)
    return F.l1_loss(result, torch.zeros_like(result), weight=weight if weighted else None)


def norm(result: Any, target: Tensor, vector: bool = False) -> Tensor:
    columns = result.abs().sum((2, 3) if vector else 2)
    return (columns if vector else columns.amax(-1)).mean() / 100


@contextmanager
def under_plan(
    model: Callable[[nn.Module], None] | None = None, loss: Callable[..., Any] | None = None
) -> Generator[None]:
    """In this block a plan is applied to a changed model, or with another loss."""
    true = compared_case.apply_plan

    def applied(given: nn.Module, plan: Plan, its_loss: Any, **kwargs: Any) -> Parallel:
        if plan == Plan() or (plan.stream is None and not plan.recompute and plan.devices == 1):
            return true(given, plan, its_loss, **kwargs)  # the mesh of one rank that draws are compared with
        if model is not None:
            model(given)
        return true(given, plan, its_loss if loss is None else loss, **kwargs)

    with patch.object(compared_case, "apply_plan", applied), patch.object(first_difference, "apply_plan", applied):
        yield


def faulty(model: nn.Module) -> None:
    model.fault = True  # type: ignore[assignment]


@contextmanager
def after_steps(
    change: Callable[[dict[str, nn.Parameter], dict[str, Tensor], dict[str, Tensor]], None],
) -> Iterator[None]:
    """In this block every step of a plan leaves something else."""
    true = Parallel.step

    def step(self: Parallel, *args: Any, **kwargs: Any) -> Tensor:
        before = {name: b.detach().clone() for name, b in self.named_buffers()}
        loss = true(self, *args, **kwargs)
        with torch.no_grad():
            change(dict(self.named_parameters()), dict(self.named_buffers()), before)
        return loss

    with patch.object(Parallel, "step", step):
        yield


def gradient_lost(parameters: dict[str, nn.Parameter], *_: Any) -> None:
    parameters["first.weight"].grad = None


def statistics_once(_: Any, buffers: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    moved = buffers["norm.running_mean"]
    moved.copy_((moved + before["norm.running_mean"]) / 2)


@contextmanager
def other_draws() -> Iterator[None]:
    true = HeldModel.draw
    with patch.object(HeldModel, "draw", lambda self: true(self) + (self.plan.stream is not None)):
        yield


def ignored_rule() -> AbstractContextManager[None]:
    return rule(torch.relu, lambda y, args: args[0])


def image_gradient_doubled() -> AbstractContextManager[None]:
    return after_steps(lambda *_: None)


@dataclass(frozen=True)
class Fault:
    plan: Plan
    put_back: Callable[[], AbstractContextManager[Any]]
    feature: str = ""
    loss: Callable[..., Any] = entropy
    module: str = ""
    """What the error names."""


FAULTS: dict[str, Fault] = {
    "a term that tiles hold whole is counted once per tile": Fault(
        STREAM, lambda: under_plan(loss=partial(gated, times=TILES)), "gate", gated, "norm"
    ),
    "a sum over labels (N,) is counted once per tile": Fault(
        STREAM, lambda: under_plan(loss=partial(labelled, times=TILES)), "", labelled
    ),
    "a reentrant checkpoint leaves no gradient": Fault(STREAM, lambda: after_steps(gradient_lost), module="first"),
    "a hook on a tensor is dropped": Fault(RECOMPUTE, lambda: under_plan(faulty), "hook", module="first"),
    "a write through a view is lost": Fault(STREAM, lambda: under_plan(faulty), "write", module="norm"),
    "torch.normal draws other numbers": Fault(STREAM, other_draws, "draw"),
    "a checkpoint around BatchNorm moves its buffers once": Fault(
        STREAM, lambda: after_steps(statistics_once), module="norm"
    ),
    "a rule ignores an argument (out=, ord=)": Fault(SPATIAL, ignored_rule, module="head"),
    "linalg.norm of a matrix is that of a vector": Fault(
        SPATIAL, lambda: under_plan(loss=partial(norm, vector=True)), "", norm
    ),
    "huber_loss is divided by the sum of its weights": Fault(
        SPATIAL, lambda: under_plan(loss=partial(huber, divided=2.0)), "", huber
    ),
    "l1_loss ignores its weights": Fault(SPATIAL, lambda: under_plan(loss=partial(l1, weighted=False)), "", l1),
    "a hook on a block's argument runs twice": Fault(RECOMPUTE, lambda: under_plan(faulty), "hook", module="first"),
}
