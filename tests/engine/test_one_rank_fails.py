"""A step in which the user's own code raises on one rank: an error in words on every rank, soon, and a way on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.errors import PeerError
from ranks import run_on

SOON = 20.0
"""Seconds; the timeout of the group is 120."""

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "spatial": {"spatial": (2, 1)},
    "channel": {"channel": 2, "channel_layers": "all"},
    "average": {"data": 2, "average": 2},
    "micro-batches": {"data": 2, "schedule": "gpipe", "microbatches": 2},
    "1f1b": {"stage": 2, "schedule": "1f1b", "microbatches": 2},
    "gpipe": {"stage": 2, "schedule": "gpipe", "microbatches": 2},
    "gems": {"stage": 2, "schedule": "gems", "microbatches": 2},
}
POINTS = ("loss", "forward pre-hook", "forward hook", "tensor hook", "gradient hook")
CASES = [
    pytest.param(name, point, marks=[] if point == "loss" else pytest.mark.slow) for name in PLANS for point in POINTS
]


class Trouble:
    """Raises at one point of a step, on some ranks, while it is armed."""

    def __init__(self, point: str, ranks: tuple[int, ...]):
        self.point, self.ranks, self.armed = point, ranks, False

    def at(self, point: str) -> None:
        if self.armed and point == self.point and dist.get_rank() in self.ranks:
            raise ValueError(f"no {point} today")

    def loss(self, output: Any, target: Tensor) -> Tensor:
        found = F.cross_entropy(output, target)
        self.at("loss")
        return found

    def before(self, module: nn.Module, given: Any) -> None:
        self.at("forward pre-hook")

    def behind(self, module: nn.Module, given: Any, made: Tensor) -> None:
        self.at("forward hook")
        if self.armed and self.point == "tensor hook" and made.requires_grad:
            made.register_hook(self.gradient)

    def gradient(self, grad: Tensor) -> None:
        self.at("tensor hook")

    def accumulated(self, parameter: Tensor) -> None:
        self.at("gradient hook")

    def watch(self, pm: mural.Parallel) -> mural.Parallel:
        for module in pm.module.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_pre_hook(self.before)
                module.register_forward_hook(self.behind)
        for parameter in pm.parameters():
            parameter.register_post_accumulate_grad_hook(self.accumulated)
        return pm


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(4, 3, 12, 10, generator=generator).double(), torch.zeros(4, 12, 10).long()


def tried(pm: mural.Parallel) -> str:
    begun = time.monotonic()
    try:
        loss = float(pm.step(*batch()))
        text = f"{loss:.12f}"
    except (ValueError, PeerError) as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    return text if seconds < SOON else f"after {seconds:.0f} s: {text}"


def troubled(options: dict[str, Any], point: str, ranks: tuple[int, ...]) -> list[str]:
    """A good step, one that raises, the next, and one of a model that was made parallel anew."""
    trouble, plan = Trouble(point, ranks), mural.Plan(**options)
    pm = trouble.watch(mural.parallelize(made(), plan, trouble.loss))
    texts = [tried(pm)]
    trouble.armed = True
    texts.append(tried(pm))
    trouble.armed = False
    pm.zero_grad()
    texts.append(tried(pm))
    return [*texts, tried(mural.parallelize(made(), plan))]


@pytest.mark.parametrize(("name", "point"), CASES)
def test_a_step_that_raises_on_one_rank_ends_on_all(name: str, point: str) -> None:
    good = f"{float(F.cross_entropy(made()(batch()[0]), batch()[1]).detach()):.12f}"
    for rank, (first, failed, after, anew) in enumerate(run_on(2, troubled, PLANS[name], point, (1,))):
        assert (first, anew) == (good, good)
        assert failed.startswith("ValueError: no " if rank == 1 else "PeerError: "), failed
        assert rank == 1 or f"ValueError: no {point} today" in failed or "another rank raised" in failed, failed
        assert after.startswith("PeerError: an earlier step failed"), after
        assert "the model again" in after, after


@pytest.mark.parametrize("name", ["data", "spatial", "channel", "average"])
def test_a_step_that_raises_alike_on_all_ranks_can_be_followed_by_others(name: str) -> None:
    for point in ("loss", "forward hook", "gradient hook"):
        found = run_on(2, troubled, PLANS[name], point, (0, 1))
        for first, failed, after, anew in found:
            assert failed == f"ValueError: no {point} today", found
            assert first == after == anew, found


def troubled_call(options: dict[str, Any], call: str) -> list[str]:
    """What a call other than a whole step gives where the loss or a hook raises on the last rank, and the next step."""
    plan = mural.Plan(**options)
    trouble = Trouble("forward hook" if call == "forward" else "loss", (plan.devices - 1,))
    pm = trouble.watch(mural.parallelize(made(), plan, trouble.loss))
    calls = {
        "forward": lambda: pm(batch()[0]),
        "evaluate": lambda: pm.evaluate(*batch()),
        "step": lambda: pm.step(*batch()),
        "accumulate": lambda: pm.step(*batch(), reduce=False),
    }
    calls[call]()
    trouble.armed, texts = True, list[str]()
    try:
        calls[call]()
    except (ValueError, PeerError) as error:
        texts.append(f"{type(error).__name__}: {error}")
    trouble.armed = False
    return [*texts, tried(pm), tried(mural.parallelize(made(), plan))]


@pytest.mark.parametrize("call", ["forward", "evaluate", "accumulate"])
@pytest.mark.parametrize("name", [pytest.param("data", marks=pytest.mark.slow), "spatial", "1f1b"])
def test_other_calls_that_raise_on_one_rank_end_on_all(name: str, call: str) -> None:
    """A rank that waits for nothing in the rest of the call has its result, and hears of it in the next call."""
    first, second = run_on(2, troubled_call, PLANS[name], call)
    assert all(text.startswith("PeerError") for text in first[:-1]), first
    assert "ValueError: no " in first[0], first
    assert second[0].startswith("ValueError: no "), second
    assert second[1].startswith("PeerError: an earlier step failed"), second
    assert first[-1][0] == second[-1][0] == "0", (first, second)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"spatial": (4, 1)}, marks=pytest.mark.slow),
        {"data": 2, "spatial": (2, 1)},
        {"stage": 2, "data": 2, "schedule": "1f1b", "microbatches": 2},
    ],
    ids=["spatial", "data × spatial", "stage × data"],
)
def test_ranks_that_are_far_from_the_one_that_raises_hear_of_it(options: dict[str, Any]) -> None:
    found = run_on(4, troubled_call, options, "step")
    for rank, texts in enumerate(found):
        assert texts[0].startswith("ValueError: no " if rank == 3 else "PeerError: "), found
        assert texts[1].startswith("PeerError: an earlier step failed"), found
        assert texts[2][0] == "0", found
