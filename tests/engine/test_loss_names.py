"""The names of what a loss brings along, and the leaves of its graph, of which none may be a stray."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.engine.loss_leaves import leaves_of
from mural.engine.loss_terms import LossTerms
from mural.errors import PlanError
from ranks import DEVICE, run_on
from trained_losses import Model, Temperature, batch, closure, given, parameter, segmenter


def names(loss: Any, model: nn.Module | None = None) -> list[str]:
    terms = LossTerms.of(loss, nn.Linear(1, 1) if model is None else model)
    return [name for name, _ in (*terms.named_parameters(), *terms.named_buffers())]


GLOBAL = nn.Linear(2, 1, bias=False)


def with_global(output: Tensor, target: Tensor, *, weight: Tensor | None = parameter(1.0)) -> Tensor:  # noqa: B008
    return sum((GLOBAL(o).mean() for o in output), target)


class Plain:
    """A loss that is no module, with a parameter, a module and something else."""

    def __init__(self) -> None:
        self.scale, self.net, self.names = parameter(1.0), nn.Linear(1, 1), ["a"]

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.net(output).mean() * self.scale

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)


def test_names_say_where_a_loss_has_its_parameters() -> None:
    module = Temperature()
    own = ["loss.log_scale", "loss.weight", "loss.calls"]
    assert names(module) == names(module.late) == names(partial(module)) == own
    assert names(partial(module.late, scale=parameter(1.0))) == ["loss.log_scale", "loss.scale", *own[1:]]
    assert names(closure(module)[0]) == [
        "loss.leaf",
        "loss.net.log_variances",
        "loss.net.mix.weight",
        "loss.net.mix.bias",
        "loss.listed.0",
    ]
    assert names(given(module)[0]) == ["loss.scale", "loss.extra.0", "loss.extra.1"]
    assert names(partial(F.mse_loss, weight=torch.ones(3))) == []
    assert names(with_global) == ["loss.weight", "loss.GLOBAL.weight"]
    assert names(Plain()) == names(Plain().method) == ["loss.scale", "loss.net.weight", "loss.net.bias"]
    assert names(F.cross_entropy) == names(nn.CrossEntropyLoss()) == names(mural.dice_loss) == []


def test_what_is_of_the_model_is_not_of_the_loss() -> None:
    """A loss that holds the model would have all its parameters twice, and a state without end."""
    model = Model()

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.tied = model, model.mask.weight
            self.same = self.own = nn.Linear(1, 1, bias=False)

    holding, head = Holding(), model.mask
    terms = LossTerms.of(holding, model)
    assert [name for name, _ in terms.named_parameters()] == ["loss.same.weight"]
    before = list(holding.state_dict()), list(model.state_dict())
    with terms.attached():
        assert [key for key in model.state_dict() if key.startswith("loss.")] == ["loss.same.weight", "loss.own.weight"]
    assert (list(holding.state_dict()), list(model.state_dict())) == before
    assert names(lambda output, target: head(output) + model.label.bias, model) == []
    assert not LossTerms.of(model.forward, model)


def test_a_name_of_the_model_and_of_the_loss_is_refused() -> None:
    model = Model()
    model.loss = nn.MSELoss()  # has no state
    assert names(Temperature(), model)[0] == "loss.log_scale"
    model.loss = nn.Linear(1, 1)
    with pytest.raises(PlanError, match=r"loss.log_scale.*another name"):
        LossTerms.of(Temperature(), model)
    assert names(model.loss, model) == []


def test_leaves_are_found_once_and_not_behind_the_stop() -> None:
    a, b = parameter(1.0), parameter(2.0)
    inner = b * 2
    loss = (a * a + inner).sum() + a
    assert sorted(map(id, leaves_of(loss))) == sorted([id(a), id(b)])
    assert leaves_of(loss, [inner.grad_fn])[0] is a
    assert leaves_of(a)[0] is a
    assert leaves_of(a.detach()) == []


# -- strays ----------------------------------------------------------------------------------------------------------


class Holder:
    """Something in a closure that nobody looks into."""

    def __init__(self) -> None:
        self.scale = parameter(1.0)


class Stray(Model):
    """A model with a tensor that trains and that nobody knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = parameter(1.0).detach().requires_grad_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask, label = super().forward(x)
        return mask * self.hidden, label


def refused(plan: mural.Plan, kind: str) -> tuple[str, bool, bool]:
    """What a stray leaf raises, whether weights and gradients stayed, and whether the next step works."""
    holder, made = Holder(), parameter(0.5)
    model = (Stray() if kind == "model" else Model()).to(DEVICE, torch.float64)

    def loss(output: Any, target: Tensor) -> Tensor:
        wanted = F.cross_entropy(output[0], target)
        if kind == "object" and pm.calls < 2:
            return wanted * holder.scale
        return wanted * torch.tensor(2.0, requires_grad=True) if kind == "nowhere" and pm.calls < 2 else wanted

    pm = mural.parallelize(model, plan, loss if kind != "module" else partial(unregistered(), made=[made]))
    before = {name: value.clone() for name, value in pm.state_dict().items() if ".1." not in name}
    text = ""
    try:
        pm.step(*batch(0))
    except PlanError as error:
        text = str(error)
    state = pm.state_dict()
    same = all(torch.equal(state[name], value) for name, value in before.items())
    same = same and not (text and any(p.grad is not None for p in pm.parameters()))
    return text, same, kind in ("model", "module") or bool(pm.step(*batch(1)).isfinite())


def unregistered() -> nn.Module:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [parameter(1.0)]

        def forward(self, output: Any, target: Tensor, made: list[Tensor]) -> Tensor:
            return F.cross_entropy(output[0], target) * self.scales[0] * made[0]

    return Loss()


@pytest.mark.parametrize("plan", [mural.Plan(data=2), mural.Plan(spatial=(2, 1)), mural.Plan(channel=2)], ids=str)
@pytest.mark.parametrize(
    ("kind", "words"),
    [("object", "loss.holder.scale"), ("model", "model.hidden"), ("module", "loss.scales.0"), ("nowhere", "(), torch")],
)
def test_a_leaf_that_nobody_averages_is_refused_by_name(plan: mural.Plan, kind: str, words: str) -> None:
    for text, same, works in run_on(2, refused, plan, kind):
        assert words in text
        assert "nn.Parameter" in text
        assert same
        assert works


def test_one_rank_averages_nothing_and_refuses_nothing() -> None:
    assert run_on(1, refused, mural.Plan(), "object") == [("", True, True)]


def inputs_allowed(plan: mural.Plan) -> bool:
    """Gradients of images are the user's: a leaf, or the result of a generator."""
    generator, x = nn.Conv2d(2, 2, 1).to(DEVICE, torch.float64), batch(0)[0]
    pm = mural.parallelize(segmenter(), plan, lambda output, target: F.cross_entropy(output[0], target))
    pm.step(generator(x), batch(0)[1])
    x.requires_grad_()
    pm.step(x, batch(0)[1])
    pm.step(mural.shard(x.detach(), pm.mesh).requires_grad_(), batch(0)[1])
    return x.grad is not None and generator.weight.grad is not None


@pytest.mark.parametrize("plan", [mural.Plan(data=2), mural.Plan(spatial=(2, 1))], ids=str)
def test_inputs_may_require_gradients(plan: mural.Plan) -> None:
    assert all(run_on(2, inputs_allowed, plan))
