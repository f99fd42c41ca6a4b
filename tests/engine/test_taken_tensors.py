"""What a block that is computed again takes, in forms that models seldom give it: exact, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mural
from law import image
from mural.errors import PlanError
from mural.shard.halo.fuse import fusing
from ranks import run_on

AGAIN = mural.Plan(recompute=("block",))
Act = Callable[..., Tensor]


class Other(Tensor):
    """A tensor of another class."""


class Block(nn.Module):
    """Does something with what it takes, then computes."""

    def __init__(self, act: Act):
        super().__init__()
        self.act, self.one, self.other = act, nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, *given: Any) -> Tensor:
        return self.other(self.one(self.act(self, *given)).sigmoid())


class Net(nn.Module):
    """Gives its block what `gives` makes of a result."""

    block: Block
    mean: Tensor
    var: Tensor

    def __init__(self, act: Act, gives: Callable[[Net, Tensor], tuple[Any, ...]] = lambda _, y: (y,)):
        super().__init__()
        self.gives, self.first, self.block = gives, nn.Conv2d(2, 4, 3, padding=1), Block(act)
        self.last = nn.Conv2d(4, 3, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(*self.gives(self, self.first(x) * 1.0)))


def steps(model: nn.Module, plan: mural.Plan, count: int = 3) -> list[Tensor]:
    """Gradients and buffers after some steps."""
    found = list[Tensor]()
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    pm = mural.parallelize(model.double(), plan)
    for step in range(count):
        pm.zero_grad()
        pm.step(image(2, 2, 24, 22, seed=step), torch.arange(2 * 24 * 22).view(2, 24, 22) % 3)
        found += [p.grad.clone() for p in pm.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in pm.module.buffers()]
    return found


def made(y: Tensor, *shape: int) -> Tensor:
    """A small tensor next to a result."""
    return torch.linspace(0.5, 1.5, 4, dtype=y.dtype).view(shape or (4, 1, 1))


def first_of(*values: Any) -> Any:
    """The last value, once the others are computed."""
    return values[-1]


def quietly(x: Tensor) -> Tensor:
    """A tensor that was written to where gradients are not known of."""
    with torch.inference_mode():
        x.mul_(0.5)
    return x


def before_training(y: Tensor) -> Tensor:
    """A tensor that autograd cannot keep."""
    with torch.inference_mode():
        return made(y) * 2


def other_data(x: Any) -> Tensor:
    """A tensor with other memory."""
    x.data = x.data * 2
    return x


def pair(z: Tensor) -> tuple[Tensor, Tensor]:
    """Complex numbers, and what reads them conjugated."""
    return z, z.conj()


EXACT: dict[str, Callable[[], Net]] = {
    "written in inference mode": lambda: Net(lambda _, x: quietly(x)),
    "made in inference mode": lambda: Net(lambda _, x, g: x + g, lambda _, y: (y, before_training(y))),
    "sparse": lambda: Net(lambda _, x, m: x + m.to_dense().view(4, 1, 1), lambda _, y: (y, made(y, 4).to_sparse())),
    "written through another class": lambda: Net(lambda _, x: first_of(x.local.detach().as_subclass(Other).mul_(2), x)),
    "written through another class, uncounted": lambda: Net(
        lambda _, x: first_of(x.local.data.as_subclass(Other).mul_(2), x)
    ),
    "another class, written to": lambda: Net(
        lambda _, x, b: first_of(b.mul_(2), x * b.as_subclass(Tensor) if type(b) is Other else x),
        lambda _, y: (y, made(y).as_subclass(Other)),
    ),
    "conjugated": lambda: Net(
        lambda _, z, c: first_of(z.mul_(2), (z * c * c).real + c.imag), lambda _, y: pair(torch.complex(y, y + 1))
    ),
    "negated": lambda: Net(
        lambda _, a, c: first_of(a.mul_(2), a * c + c),
        lambda _, y: tuple(z.imag for z in pair(torch.complex(y, y + 1))),
    ),
    "statistics": lambda: Net(
        lambda _, x, mean, var: F.batch_norm(x, mean, var, training=True), lambda net, y: (y, net.mean, net.var)
    ),
    "other data": lambda: Net(lambda _, x: other_data(x)),
    "a view that gets a gradient": lambda: Net(
        lambda block, x, m, v: first_of(m.mul_(block.one.bias.view(4, 1, 1)), x * v),
        lambda _, y: (lambda m: (y, m, m[:]))(made(y)),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    """What was written in inference mode, as another class, or read conjugated was wrong, or ended in torch's words."""
    for one, other in zip(steps(EXACT[name](), AGAIN), steps(EXACT[name](), mural.Plan()), strict=True):
        assert torch.equal(one, other)


class After(Net):
    """Writes to what its block took."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 1.0
        result = self.block(y)
        with torch.no_grad():
            y.mul_(2)
        return self.last(result)


REFUSED: dict[str, tuple[Callable[[], Net], str]] = {
    "own parameter": (
        lambda: Net(
            lambda block, x, p: first_of(block.one.weight.data.mul_(0.5), x * p.view(4, 1, 1)),
            lambda net, y: (y, net.block.one.weight[:, 0, 0, 0].detach()),
        ),
        "in the memory of a parameter or buffer of its own",
    ),
    "own parameter, through the argument": (
        lambda: Net(
            lambda _, x, p: first_of(p.data.mul_(0.5), x * p.view(4, 1, 1)),
            lambda net, y: (y, net.block.one.bias),
        ),
        "in the memory of a parameter or buffer of its own",
    ),
    "two classes": (
        lambda: Net(
            lambda _, x, b, c: first_of(b.mul_(2), x * c.as_subclass(Tensor)),
            lambda _, y: (lambda b: (y, b, b.as_subclass(Other)))(made(y)),
        ),
        r"one memory in several types \(Other of torch.float64, torch.float64\)",
    ),
    "written to after it": (lambda: After(lambda _, x: x + 1.0), "written to after the block's forward and before its"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, words = REFUSED[name]
    steps(make(), mural.Plan())
    with pytest.raises(PlanError, match=f"Block, a block in recompute, .*{words}"):
        steps(make(), AGAIN)


class Viewed(nn.Module):
    """From the second run on, gives its block a tensor with a margin and a view of it; the block writes to the one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.plain = nn.Conv2d(2, 4, 3, padding=1), *(nn.Conv2d(4, 4, 3, padding=1) for _ in "12")
        self.block = Block(lambda _, y, view: first_of(y.mul_(2), torch.cat([view, y[:, 2:]], 1) * y))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y = self.two(self.one(x))
        return self.plain(y) if self.runs == 1 else self.block(y, y[:, :2])


def views_apart(offload: Any) -> float:
    """How far gradients are apart from those that keep everything."""
    with fusing(True):
        plans = (mural.Plan(spatial=(2, 1), recompute=again, offload=kinds) for again, kinds in
                 ((("block",), offload), ((), ())))  # fmt: skip
        pairs = [steps(Viewed(), plan, 4) for plan in plans]
    return max(float((a - b).abs().max()) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("offload", [(), ("activations",)])
def test_a_view_of_a_tensor_with_a_margin(offload: Any) -> None:
    assert max(run_on(2, views_apart, offload)) < 1e-12


class Failing(Block):
    """Fails once."""

    fails = True

    def forward(self, *given: Any) -> Tensor:
        y = self.one(*given)
        if self.fails:
            self.fails = False
            raise ValueError("a bad batch")
        return self.other(y)


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    """With torch 2.11, hooks of torch's checkpoint lasted as long as the exception, and all models met them."""
    net = Net(lambda _, x: x)
    net.block = Failing(lambda _, x: x)
    pm, given = mural.parallelize(net, AGAIN), (torch.ones(1, 2, 6, 6), torch.zeros(1, 6, 6).long())
    with pytest.raises(ValueError, match="a bad batch") as kept:
        pm.step(*given)
    assert not _get_current_dispatch_mode_stack()
    assert pm.step(*given).isfinite()
    assert "a bad batch" in str(kept.value)
