"""Parameters of a loss train as on one device, under every plan without stages, and have names in the model's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mural
from law import difference
from mural.engine.loss_terms import LossTerms
from mural.errors import MuralError
from ranks import DEVICE, run_on
from trained_losses import LOSSES, Made, Temperature, Uncertainty, batch, segmenter, uncertainty

PLANS = [
    mural.Plan(data=2),
    mural.Plan(spatial=(2, 1)),
    mural.Plan(channel=2),
    mural.Plan(data=2, spatial=(2, 1)),
    mural.Plan(channel=2, spatial=(2, 1)),
    mural.Plan(data=2, average=2),
]
TOLERANCE = 1e-10


class Replica:
    """A model and its loss on one device."""

    def __init__(self, make: Callable[[nn.Module], Made]):
        self.model = segmenter()
        self.loss, self.terms = make(self.model)
        self.trained = [*self.model.parameters(), *self.terms]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.1, momentum=0.9)

    def step(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.trained, 0.5)
        self.optimizer.step()
        return loss.detach(), norm


@torch.no_grad()
def meet(replicas: list[Replica]) -> None:
    """Give replicas the mean of their weights, buffers and momenta."""
    momenta = [[r.optimizer.state[p]["momentum_buffer"] for p in r.trained] for r in replicas]
    buffers = [[b for b in r.model.buffers() if b.is_floating_point()] for r in replicas]
    for held in zip(*([*r.trained, *m, *b] for r, m, b in zip(replicas, momenta, buffers, strict=True)), strict=True):
        mean = torch.stack(list(held)).mean(0)
        for tensor in held:
            tensor.copy_(mean)


def trained(plan: mural.Plan, make: Callable[[nn.Module], Made]) -> float:
    """How far four steps under a plan are from those of one device, or of one for each data rank that trains alone."""
    replicas = [Replica(make) for _ in range(plan.data if plan.average else 1)]
    model = segmenter()
    loss, terms = make(model)
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for term in terms:
            term.add_(rank)  # those of rank 0 count
    pm = mural.parallelize(model, plan, loss)
    mine = replicas[pm.world_mesh.coordinates["data"] if plan.average else 0]
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    worst = 0.0
    for step in range(4):
        x, target = batch(step)
        found = [r.step(*part) for r, part in zip(replicas, parts(x, target, len(replicas)), strict=True)]
        expected = torch.stack([value for value, _ in found]).mean()
        worst = max(worst, difference(pm.step(x, target), expected))
        norm = pm.clip_grad_norm_(0.5)
        worst = max(worst, difference(norm, found[replicas.index(mine)][1]))
        optimizer.step()
        pm.updated(optimizer)
        pm.zero_grad()
        if plan.average and step % plan.average == plan.average - 1:
            meet(replicas)
        if any(p.grad is not None for p in pm.parameters()):
            return float("inf")
    own = dict(pm.named_parameters())
    if [name for name in own if name.startswith("loss.")] != [n for n, _ in pm.loss_terms.named_parameters()]:
        return float("inf")
    state = pm.state_dict()
    plain = dict(mine.model.named_parameters()) | dict(LossTerms.of(mine.loss, mine.model).named_parameters())
    ours = {name: state[name].to(DEVICE) for name in own}
    return max(worst, *(difference(ours[name], p.detach()) for name, p in plain.items()))


def parts(x: Tensor, target: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.chunk(count), target.chunk(count), strict=True))


CASES = [(plan, make) for make in LOSSES for plan in (PLANS if make is uncertainty else PLANS[:4])]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "make"), CASES, ids=lambda v: v.__name__ if callable(v) else str(v))
def test_training_equals_one_device(plan: mural.Plan, make: Any) -> None:
    assert max(run_on(plan.devices, trained, plan, make)) < TOLERANCE


# -- states ----------------------------------------------------------------------------------------------------------


def stepped(plan: mural.Plan) -> dict[str, Any]:
    """The state after a step."""
    pm = mural.parallelize(segmenter(), plan, Temperature())
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm.step(*batch(0))
    optimizer.step()
    return pm.state_dict()


def loaded(plan: mural.Plan, state: dict[str, Any], rank0: bool) -> list[str]:
    """What is wrong about loading a state."""
    pm = mural.parallelize(segmenter(), plan, Temperature())
    own = pm.world_mesh.rank == 0 or not rank0
    keys = pm.load_state_dict(state if own else {}, rank0=rank0)
    wrong = [*keys.missing_keys, *keys.unexpected_keys]
    wrong += [name for name, value in pm.state_dict().items() if not torch.equal(value, state[name].cpu())]
    least = {name: value for name, value in state.items() if not name.startswith("loss.l")}
    keys = pm.load_state_dict(least if own else {}, strict=False, rank0=rank0)
    if keys.missing_keys != ["loss.log_scale"]:
        wrong.append(f"missing {keys.missing_keys}")
    keys = pm.load_state_dict({**state, "loss.other": torch.ones(1)} if own else {}, strict=False, rank0=rank0)
    if keys.unexpected_keys != ["loss.other"]:
        wrong.append(f"unexpected {keys.unexpected_keys}")
    try:
        pm.load_state_dict(least if own else {}, rank0=rank0)
        wrong.append("a state without a parameter of the loss was taken")
    except (RuntimeError, MuralError) as error:
        wrong += [] if 'Missing key(s) in state_dict: "loss.log_scale"' in str(error) else [str(error)]
    return wrong


@pytest.mark.parametrize("rank0", [False, True])
def test_a_state_goes_from_plan_to_plan(rank0: bool) -> None:
    one = run_on(1, stepped, mural.Plan())[0]
    assert list(one)[-3:] == ["loss.log_scale", "loss.weight", "loss.calls"]
    for plan in (mural.Plan(data=2), mural.Plan(channel=2, channel_layers="all"), mural.Plan(spatial=(2, 1))):
        for state in run_on(2, stepped, plan):
            assert list(state) == list(one)
            assert max(difference(state[name].double(), one[name].double()) for name in one) < TOLERANCE
        assert run_on(2, loaded, plan, one, rank0) == [[], []]
    assert run_on(1, loaded, mural.Plan(), state, rank0) == [[]]


def accumulated(plan: mural.Plan) -> float:
    model = segmenter().eval()
    loss, plain, theirs = Uncertainty(), segmenter().eval(), Uncertainty()
    pm = mural.parallelize(model, plan, loss)
    for step in range(2):
        x, target = batch(step)
        (theirs(plain(x), target) * 0.5).backward()
        pm.step(x, target, reduce=False, weight=0.5)
    pm.reduce_gradients()
    found, wanted = dict(pm.named_parameters()), {f"loss.{n}": p for n, p in theirs.named_parameters()}
    worst = max(difference(found[name].grad, p.grad) for name, p in wanted.items())
    loss.log_variances.grad[0] = float("inf")  # type: ignore[index]
    return worst if pm.found_inf() else 1.0


@pytest.mark.parametrize("plan", PLANS[:3], ids=str)
def test_accumulated_gradients_of_a_loss(plan: mural.Plan) -> None:
    assert max(run_on(2, accumulated, plan)) < TOLERANCE
