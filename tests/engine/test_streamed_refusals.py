"""What a streamed plan refuses, by name, and what it notices."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import Expr
from streamed_law import apart, check_steps, images, streamed
from streamed_models import Spec


class Between(nn.Module):
    """An expression of x between two convolutions."""

    def __init__(self, code: str):
        super().__init__()
        self.one, self.two, self.code = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), Expr(code)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.code(self.one(x)))


class Doubled(torch.autograd.Function):
    """A function that nobody can look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Custom(nn.Module):
    """A model with a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.one(x))


def step(model: nn.Module, stream: tuple[int, ...] = (8, 8), **plan: Any) -> Any:
    """A step of a streamed model."""
    pm = mural.parallelize(model.double(), mural.Plan(stream=stream, **plan))
    return pm.step(images(1, (40, 44), 1)[0], torch.zeros(1, 40, 44, dtype=torch.long))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("F.scaled_dot_product_attention(*[x.flatten(2).transpose(1, 2)] * 3).transpose(1, 2).view(x.shape)", "attent"),
        ("x - x.amax((2, 3), keepdim=True)", "amax"),
        ("x - x.max()", "max"),
        ("F.pad(x, (1, 1, 1, 1), mode='circular')[..., 1:-1, 1:-1]", "circular"),
        ("x.roll(1, 2)", "roll"),
        ("x.flip(3)", "flip"),
        ("x.softmax(2)", "softmax"),
        ("x.cumsum(3)", "cumsum"),
        ("x.sort(2)[0]", "sort"),
        ("x + x.median()", "median"),
        ("x - x.mean(2, keepdim=True)", "mean adds up"),
        ("torch.cat([x, x], 2)[:, :, :40]", "cat along"),
        ("x + x[:, :, :1, 0, None]", "one position"),
        ("x.index_select(2, torch.arange(39, -1, -1, device=x.device))", "index"),
        ("x @ torch.ones(44, 44, dtype=x.dtype, device=x.device)", "matmul"),
        ("torch.fft.fft2(x).real", "fft"),
        ("F.layer_norm(x, x.shape[1:])", "layer_norm"),
    ],
)
def test_what_is_not_local(code: str, name: str) -> None:
    """At full resolution, with the call's name and site and what helps."""
    with pytest.raises(mural.PlanError, match=name) as error:
        step(Between(code))
    assert "model.code" in str(error.value)
    assert "raise stream, or move it to a lower resolution" in str(error.value)


def test_custom_functions() -> None:
    with pytest.raises(mural.PlanError, match=r"Doubled.*custom autograd\.Function"):
        step(Custom())


def test_statistics_of_ranks() -> None:
    with pytest.raises(mural.PlanError, match="batchnorm"):
        step(Spec(norm="batch").build(), batchnorm="rank")


@pytest.mark.parametrize(
    "plan",
    [{"stage": 2}, {"microbatches": 2}, {"channel": 2}, {"stage": 2, "schedule": "gems"}],
    ids=str,
)
def test_other_divisions(plan: dict[str, Any]) -> None:
    with pytest.raises(mural.PlanError, match="stream"):
        mural.parallelize(nn.Conv2d(2, 3, 3), mural.Plan(stream=(8, 8), **plan))


@pytest.mark.parametrize("stream", [(8,), (8, 8, 8)])
def test_tiles_of_other_dims(stream: tuple[int, ...]) -> None:
    with pytest.raises(mural.PlanError, match="along each of the 2 dims"):
        step(nn.Conv2d(2, 3, 3, padding=1), stream)


def test_running_statistics_of_instances() -> None:
    with pytest.raises(mural.PlanError, match="track_running_stats"):
        step(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.InstanceNorm2d(3, track_running_stats=True)))


def test_without_a_stream() -> None:
    pm = mural.parallelize(nn.Conv2d(2, 3, 3), mural.Plan())
    with pytest.raises(mural.PlanError, match="set stream"):
        pm(torch.zeros(1, 2, 8, 8), into=[])
    with pytest.raises(mural.PlanError, match="for plans that stream"):
        pm.evaluate_into(torch.zeros(1, 2, 8, 8), torch.zeros(1, 6, 6).long(), None)  # type: ignore[arg-type]


class Switched(nn.Module):
    """A model whose forward depends on an attribute, a mode, or the kind of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.deep = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=2, dilation=2), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x.relu()) if self.deep else x


def test_a_forward_that_changes_is_noticed() -> None:
    """The calls are captured anew at each step; after a change, the program of the new calls runs."""
    torch.manual_seed(1)
    plain = Switched().double()
    pm = streamed(plain, F.cross_entropy, mural.Plan(stream=(8, 8)), None)
    (x,) = images(1, (20, 22), 1)
    target = torch.randint(0, 3, (1, 20, 22))
    for deep in (False, True, True, False):
        plain.deep = pm.plain.deep = deep
        plain.zero_grad()
        pm.zero_grad()
        expected = F.cross_entropy(plain(x), target)
        expected.backward()
        assert apart(pm.step(x, target), expected) < 1e-12
        for p, q in zip(plain.parameters(), pm.parameters(), strict=True):
            assert apart(q.grad, p.grad) < 1e-10


def test_frozen_while_training() -> None:
    """Norms that are frozen between two steps use their running statistics from then on."""
    model = Spec(norm="batch").build()
    batches = [(x, torch.randint(0, 3, (2, 20, 22))) for x in images(2, (20, 22))]
    check_steps(model, F.cross_entropy, batches, mural.Plan(stream=(8, 8)))
    check_steps(model.eval(), F.cross_entropy, batches, mural.Plan(stream=(8, 8)))


class Carrying(nn.Module):
    """A forward that leaves something for the next one, or remembers what it saw."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.conv, self.count, self.size = what, nn.Conv2d(2, 3, 3, padding=1), 0, 7
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.size = x.shape[2]
        x = self.conv(x)
        if self.what == "count":
            self.count += 1
        if self.what == "average":
            self.average = 0.9 * self.average + 0.1 * x.detach().mean((0, 2, 3))
        return x


@pytest.mark.parametrize("what", ["count", "average"])
def test_what_a_forward_carries(what: str) -> None:
    """A step makes the calls of a forward without running it: a count stayed as it was, and a buffer too."""
    with pytest.raises(mural.UnsupportedOp, match=rf"counts on \['model.{what}'\]"):
        step(Carrying(what))


class BothModes(nn.Module):
    """Runs a norm with its running statistics, and with those of the batch, which moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.norm.eval()
        z = self.norm(y)
        self.norm.train()
        return self.norm(y) + z


def test_a_norm_in_both_modes() -> None:
    """Backward through the first call took the statistics that the second one had moved."""
    with pytest.raises(mural.UnsupportedOp, match=r"batch_norm at .*norm.* reads .*running_mean"):
        step(BothModes())


CALLS = [0]


class Config:
    """What several layers may share."""

    calls = 0


class Remembering(Carrying):
    """The same, in places other than an attribute or a buffer of its own."""

    calls = 0

    def __init__(self, what: str):
        super().__init__(what)
        self.table, self.config, self.last, self.past = {"calls": 0}, Config(), None, list[Tensor]()
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.what == "table":
            self.table["calls"] += 1
        elif self.what == "config":
            self.config.calls += 1
        elif self.what == "calls":
            Remembering.calls += 1
        elif self.what == "CALLS":
            CALLS[0] += 1
        elif self.what == "last":
            y, self.last = y if self.last is None else y + self.last, y.detach()
        elif self.what == "past":
            self.past.append(y.detach().mean())
            y = y + sum(self.past)
        elif self.what == "first":
            y = y.relu() if self.first else y
            self.first = False
        return y * (1 + self.table["calls"] + self.config.calls + Remembering.calls + CALLS[0])


@pytest.mark.parametrize("what", ["table", "config", "calls", "CALLS", "last", "past", "first"])
def test_what_a_forward_goes_by_the_next_time(what: str) -> None:
    """What was not a number in an attribute stayed as it was before the first step, and losses were those of then."""
    with pytest.raises(mural.UnsupportedOp, match=rf"counts on \['[\w.]*{what}'\]"):
        step(Remembering(what))


def counting() -> Any:
    calls = [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(output, target) * calls[0]

    return loss


class Counted:
    """A loss that is a method, and counts its calls."""

    calls = 0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * self.calls


@pytest.mark.parametrize("loss", [counting(), partial(counting()), Counted().loss])
def test_a_loss_that_counts(loss: Any) -> None:
    """It counted how often a step looked at it, which is not how often it would have been called."""
    pm = mural.parallelize(nn.Conv2d(2, 3, 3, padding=1), mural.Plan(stream=(8, 8)), loss=loss)
    with pytest.raises(mural.UnsupportedOp, match=r"counts on \['(loss_call|counting.*calls)'\]"):
        pm.step(torch.zeros(1, 2, 16, 16), torch.zeros(1, 16, 16).long())


class Caching(nn.Module):
    """Keeps what is the same in each forward, and what nobody reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.masks = nn.Conv2d(2, 3, 3, padding=1), dict[int, Tensor]()
        self.ramp: Tensor | None = None
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.ramp is None:
            self.ramp = torch.arange(3.0, device=x.device).view(3, 1, 1)
        if x.shape[3] not in self.masks:
            self.masks[x.shape[3]] = torch.ones(1, 3, 1, 1, device=x.device).cumsum(1)
        y = self.conv(x)
        self.found = [y, y.detach()]
        return y * self.ramp + self.masks[x.shape[3]]


def test_what_a_forward_caches() -> None:
    """It is no reason to refuse."""
    step(Caching())


def test_what_a_forward_remembers() -> None:
    """An attribute that is set anew each time is no reason to refuse."""
    step(Carrying("nothing"))


def test_hooks_of_modules() -> None:
    """They were not called."""
    model = nn.Conv2d(2, 3, 3, padding=1)
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(mural.PlanError, match=r"\['the model'\] have backward hooks"):
        step(model)
