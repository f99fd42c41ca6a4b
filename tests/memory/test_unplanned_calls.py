"""Offload where a step does now and then what the noted one did not: the same bits, and nothing reads what is away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.engine.parallel import Parallel
from mural.shard.halo.fuse import fusing
from ranks import run_on

PARAMETERS = mural.Plan(offload=("parameters",))
ALL = mural.Plan(offload=("activations", "parameters", "optimizer"))
EVERY = 3
"""In every step of that number something else happens."""
Turn = Callable[[Parallel], Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    return nn.Sequential(*layers).double()


class Sometimes(nn.Module):
    """A model that reaches its first weight past its layer, in some steps."""

    def __init__(self, reach: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.net, self.reach, self.calls = net(), reach, 0

    def forward(self, x: Tensor) -> Tensor:
        y, self.calls = self.net(x), self.calls + 1
        return y if self.calls % EVERY else self.reach(y, self.net[0].weight, x)  # type: ignore[arg-type]


def steps(
    make: Callable[[], nn.Module], plan: mural.Plan, between: Turn = lambda pm: None, count: int = 8
) -> list[Any]:
    """Losses and gradients of some steps; `between` happens after some of them."""
    torch.manual_seed(1)
    pm = mural.parallelize(make(), plan)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    found: list[Any] = []
    for step in range(count):
        draws = torch.Generator().manual_seed(step)
        image = torch.randn(2, 2, 16, 14, generator=draws, dtype=torch.float64)
        target = torch.randint(0, 3, (2, 16, 14), generator=draws)
        optimizer.zero_grad()
        found.append(pm.step(image, target).item())
        found += [p.grad.tolist() for p in pm.parameters() if p.grad is not None]
        optimizer.step()
        if step % EVERY == 0:
            found.append(between(pm))
    return found


def squared(y: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return y + 1e-3 * weight.square().sum()


def normed(y: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    with torch.no_grad():
        scale = weight.norm()
    return y * scale


def as_number(y: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return y * weight.detach().abs().max().item()


def cloned(y: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return y * weight.detach().clone().mean()


def constant_of_a_product(y: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    """Backward needs the weight, which autograd saved of a product, after it has left."""
    return y * weight.detach()[0, 0, 0, 0]


def another_convolution(y: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    return y + F.conv2d(x, weight.flip(0), padding=1)[:, :3]


def mapped(y: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return y + torch.func.vmap(lambda kernel: (2 * kernel).sum())(weight).mean()


REACHES = (squared, normed, as_number, cloned, constant_of_a_product, another_convolution, mapped)


@pytest.mark.parametrize("plan", [PARAMETERS, ALL], ids=["parameters", "all"])
@pytest.mark.parametrize("reach", REACHES)
def test_a_weight_that_is_reached_past_its_layer_now_and_then(reach: Any, plan: mural.Plan) -> None:
    """It was read while it was away: torch ended the process."""
    assert steps(lambda: Sometimes(reach), plan) == steps(lambda: Sometimes(reach), mural.Plan())


def hooked() -> nn.Module:
    """A gradient hook that reads another layer's weight, in some steps."""
    model, calls = net(), [0]
    first, last = model[0].weight, model[4].weight

    def hook(grad: Tensor) -> Tensor:
        calls[0] += 1
        return grad if calls[0] % EVERY else grad + first.detach().mean()  # type: ignore[operator]

    last.register_hook(hook)  # type: ignore[operator]
    return model


def test_a_hook_on_a_gradient_that_reads_another_weight() -> None:
    """A block that sees calls of torch does not go on in backward, where the hook is called."""
    assert steps(hooked, PARAMETERS) == steps(hooked, mural.Plan())


class Renormed(nn.Module):
    """An embedding that writes to its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.codes = net(), nn.Embedding(5, 3, max_norm=0.5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.codes(torch.arange(5))[x.numel() % 5].view(1, 3, 1, 1)


def updated_in_backward() -> nn.Module:
    """Weights that a hook updates as soon as their gradient is there, without an optimizer."""
    model = net()

    def update(p: Tensor) -> None:
        p.data.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return model


class Clamped(nn.Module):
    """A model that reads its first weight in every step, and writes to it there in some, before it leaves again."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        weight = self.net[0].weight.detach()
        if self.calls % EVERY == 0:
            weight.clamp_(-0.05, 0.05)  # type: ignore[operator]
        return self.net(x) + weight.mean()  # type: ignore[operator]


@pytest.mark.parametrize("make", [Renormed, updated_in_backward, Clamped])
def test_weights_that_a_step_writes_to(make: Callable[[], nn.Module]) -> None:
    """What was written was lost: the host had copied the weight before."""
    assert steps(make, PARAMETERS) == steps(make, mural.Plan())


def as_array(pm: Parallel) -> float:
    return float(next(iter(pm.parameters())).detach().numpy().sum())


def gradient_as_array(pm: Parallel) -> float:
    grad = next(iter(pm.parameters())).grad
    assert grad is not None
    return float(grad.numpy().sum())


def in_shared_memory(pm: Parallel) -> bool:
    pm.module.share_memory()
    return True


@pytest.mark.parametrize("between", [as_array, gradient_as_array, in_shared_memory])
@pytest.mark.parametrize("memory", ["", "20KB"])
def test_memory_that_others_use_as_well_stays(between: Turn, memory: str) -> None:
    """Storages that NumPy shares cannot be emptied, and those that other processes share must not be."""
    plan = mural.Plan(offload=("activations", "parameters", "optimizer"), memory=memory)
    assert steps(net, plan, between) == steps(net, mural.Plan(), between)


def test_calls_that_every_step_makes_end_no_plan() -> None:
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return squared(self.net(x), self.net[0].weight, x)  # type: ignore[arg-type]

    pm = mural.parallelize(Always(), PARAMETERS)
    for step in range(4):
        draws = torch.Generator().manual_seed(step)
        image = torch.randn(2, 2, 16, 14, generator=draws, dtype=torch.float64)
        pm.step(image, torch.randint(0, 3, (2, 16, 14), generator=draws))
    assert pm.offloading is not None
    assert not pm.offloading.lost
    assert pm.offloading.report()["to_host"] > 0


def fused_on_rank(kinds: Any, fused: bool) -> bool:
    with fusing(fused or None):
        plain, offloaded = (steps(net, mural.Plan(spatial=(2, 1), offload=k), count=5) for k in ((), kinds))
    return plain == offloaded


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kinds", [("parameters",), ("activations",), ("activations", "parameters")])
def test_chains_of_layers_that_share_an_exchange(kinds: Any, fused: bool) -> None:
    """Their results are cut out of larger ones, whose backward read weights before any gate opened; and with
    activations, offload was taken for a checkpoint, so that layers exchanged one by one, and rounded differently.
    """
    assert all(run_on(2, fused_on_rank, kinds, fused))
