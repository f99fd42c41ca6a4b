"""Channels with the rest of a step: dropout, recompute, accumulation, bfloat16, `check`, frozen layers, plain calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference, image
from mural.channel.share import share_of, shares_among
from mural.channel.split import split_channels
from ranks import run_on

Plan = mural.Plan
TOLERANCE = 1e-10


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(5, 4, 3, stride=2), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2)),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Sequential(nn.Linear(16, 9), nn.ReLU(), nn.Dropout(dropout), nn.Linear(9, 3)),
    ).double()


def batch(images: int = 5) -> tuple[Tensor, Tensor]:
    return image(images, 2, 12, 9), torch.arange(images) % 3


def grads_of(pm: Any) -> dict[str, Tensor]:
    """The whole gradients, by name. Collective."""
    found: dict[str, Tensor] = {}
    for name, p in pm.named_parameters():
        share = share_of(p)
        found[name] = p.grad if share is None else share.whole(p.grad)
    return found


def stepped(plan: mural.Plan, dropout: float) -> tuple[Tensor, dict[str, Tensor]]:
    pm = mural.parallelize(model(dropout), plan, seed=7)
    loss = pm.step(*batch())
    return loss, grads_of(pm)


def apart(found: list[tuple[Tensor, dict[str, Tensor]]], expected: tuple[Tensor, dict[str, Tensor]]) -> float:
    worst = [difference(loss, expected[0]) for loss, _ in found]
    worst += [difference(grads[name], grad) for _, grads in found for name, grad in expected[1].items()]
    return max(worst)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(channel=2),
        Plan(channel=2, channel_layers="all", recompute="all", channel_exchange="part"),
        Plan(channel=2, channel_layers="all", recompute=("3", "6"), spatial=(1, 2), channel_exchange="rank"),
    ],
    ids=str,
)
def test_dropout_draws_what_it_draws_on_one_rank(plan: mural.Plan) -> None:
    (expected,) = run_on(1, stepped, Plan(), 0.4)
    assert apart(run_on(plan.devices, stepped, plan, 0.4), expected) < TOLERANCE


def accumulated(plan: mural.Plan) -> tuple[Tensor, dict[str, Tensor]]:
    pm = mural.parallelize(model().eval(), plan)
    x, target = batch(6)
    total = torch.zeros((), dtype=torch.float64)
    for i, part in enumerate((slice(0, 3), slice(3, 5), slice(5, 6))):
        weight = (part.stop - part.start) / 6
        total += weight * pm.step(x[part], target[part], reduce=i == 2, weight=weight)
    return total, grads_of(pm)


def test_accumulated_gradients_equal_those_of_one_batch() -> None:
    (expected,) = run_on(1, accumulated, Plan())
    assert apart(run_on(4, accumulated, Plan(channel=2, data=2, channel_layers="all")), expected) < TOLERANCE


def late(plan: mural.Plan) -> float:
    """Gradients of steps that did not reduce are reduced before they are clipped."""
    plain, pm = model(), mural.parallelize(model(), plan)
    F.cross_entropy(plain(batch()[0]), batch()[1]).backward()
    pm.step(*batch(), reduce=False)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    return difference(pm.clip_grad_norm_(0.1), norm)


def test_what_was_not_reduced_is_reduced_before_it_is_clipped() -> None:
    assert max(run_on(4, late, Plan(channel=2, data=2))) < TOLERANCE


def checked(plan: mural.Plan) -> dict[str, float]:
    return mural.check(model(0.3), plan, *batch(3))


@pytest.mark.parametrize("plan", [Plan(channel=2, channel_layers="all"), Plan(channel=2, spatial=(2, 1))], ids=str)
def test_check_compares_shares(plan: mural.Plan) -> None:
    assert max(max(found.values()) for found in run_on(plan.devices, checked, plan)) < TOLERANCE


def low(plan: mural.Plan) -> tuple[float, Tensor]:
    pm = mural.parallelize(model().float(), plan)
    x, target = batch()
    loss = pm.step(x.float(), target)
    return float(loss), grads_of(pm)["6.0.weight"]


def test_bfloat16_sends_what_it_computes_in() -> None:
    ((expected, grad),) = run_on(1, low, Plan(precision="bfloat16"))
    for layers in ("all", ("6.0:input", "6.3:input")):
        for loss, found in run_on(2, low, Plan(channel=2, precision="bfloat16", channel_layers=layers)):
            assert abs(loss - expected) < 0.02
            assert difference(found.double(), grad.double()) < 0.05


def frozen(plan: mural.Plan) -> float:
    """Layers that are not trained, and a step whose loss is infinite on one rank's images alone."""
    plain, made = model(), model()
    for net in (plain, made):
        net[6][0].requires_grad_(False)
        net[0].requires_grad_(False)
    pm = mural.parallelize(made, plan)
    F.cross_entropy(plain(batch()[0]), batch()[1]).backward()
    pm.step(*batch())
    grads = [(q, p.grad) for q, p in zip(pm.parameters(), plain.parameters(), strict=True)]
    worst = max(difference(q.grad, share.cut(g) if (share := share_of(q)) else g) for q, g in grads if g is not None)
    if any(q.grad is not None for q, g in grads if g is None) or pm.found_inf():
        raise AssertionError("a frozen layer has a gradient")
    part = shares_among(pm.parameters())[-1][0]
    if pm.world_mesh.rank == 0 and part.grad is not None:
        part.grad[0] = float("inf")
    if not pm.found_inf():
        raise AssertionError("an infinite gradient of one share was not found")
    return worst


def test_frozen_layers_and_infinite_gradients() -> None:
    assert max(run_on(2, frozen, Plan(channel=2))) < TOLERANCE


def by_hand() -> tuple[float, float]:
    """A training loop without a plan: `init`, `split_channels`, `shard`, `reduce_gradients`; and inference."""
    mesh = mural.init(channel=2)
    plain, ours = model(), model()
    split_channels(ours, mesh, ("6.0:output", "6.3:input", "0"), "rank")
    x, target = batch()
    F.cross_entropy(plain(x), target).backward()
    sharded = mural.shard(x, mesh)
    F.cross_entropy(ours(sharded), mural.shard(target, mesh, dims=())).backward()
    mural.reduce_gradients(ours, mesh)
    mural.reduce_gradients(ours, mesh)
    pairs = list(zip(plain.parameters(), ours.parameters(), strict=True))
    worst = max(difference(q.grad, share.cut(p.grad) if (share := share_of(q)) else p.grad) for p, q in pairs)
    with torch.no_grad():
        return worst, difference(ours.eval()(sharded).full(), plain.eval()(x))


def test_channels_without_a_plan() -> None:
    assert max(max(pair) for pair in run_on(2, by_hand)) < TOLERANCE


def memory_of(plan: mural.Plan) -> tuple[int, int]:
    """Numbers that a rank holds in parameters, and in the optimizer's state of them."""
    pm = mural.parallelize(nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.Linear(10, 3)), plan)
    optimizer = torch.optim.Adam(pm.parameters())
    pm.step(torch.randn(4, 3, 2, 2), torch.arange(4) % 3)
    optimizer.step()
    state = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.ndim)
    return sum(p.numel() for p in pm.parameters()), state


def test_parameters_and_their_state_live_where_they_belong() -> None:
    held = run_on(4, memory_of, Plan(channel=4))
    # Ten outputs are cut into 3, 2, 3 and 2; three are too few for four ranks, so that layer stays whole on each.
    assert [n for n, _ in held] == [13 * width + 33 for width in (3, 2, 3, 2)]
    assert [state for _, state in held] == [2 * n for n, _ in held]
