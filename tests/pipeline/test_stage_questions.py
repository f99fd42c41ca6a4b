"""What a forward asks of a tensor that another stage has, and backwards of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_cases import TOLERANCE, Case, compared, parallel_of
from torch import Tensor, nn

import mural
from mural.errors import UnsupportedOp
from ranks import run_on


class Asking(nn.Module):
    """Asks whether its activation has a gradient, before it registers a hook on it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 4), (4, 3)))

    def forward(self, image: Tensor) -> Any:
        x = self.first(image) * 1.0
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
            x.retain_grad()
        return self.head(self.second(x).tanh())


class Inner(Asking):
    """Goes back through calls of its own."""

    def forward(self, image: Tensor) -> Any:
        with torch.enable_grad():
            z = self.first(image).detach().requires_grad_()
            (grad,) = torch.autograd.grad(z.tanh().sum(), z)
        return self.head(self.second(self.first(image) * grad).tanh())


def law(kind: type[nn.Module], plan: mural.Plan) -> float:
    torch.manual_seed(0)
    models = kind().double(), kind().double()
    models[1].load_state_dict(models[0].state_dict())
    case = Case(models[1], plan, sizes=((8, 6),) * 2)
    return max(compared(case, models[0], parallel_of(case, models[1])).values())


def refusal(plan: mural.Plan) -> str:
    with pytest.raises(UnsupportedOp) as raised:
        mural.parallelize(Inner().double(), plan)
    return str(raised.value)


def test_whether_a_tensor_of_another_stage_has_a_gradient() -> None:
    """The answer was the tensor itself, whose truth value is none."""
    assert max(run_on(2, law, Asking, mural.Plan(stage=2, microbatches=2, schedule="1f1b"))) <= TOLERANCE


def test_gradients_inside_a_forward_in_stages() -> None:
    """By layers they are exact; what they keep was foreseen by a call that failed in torch's words."""
    assert max(run_on(2, law, Inner, mural.Plan(stage=2, cuts="layers"))) <= TOLERANCE
    for text in run_on(2, refusal, mural.Plan(stage=2)):
        assert "torch.autograd.grad goes back through calls of the forward" in text


def test_gradients_of_an_image_in_micro_batches() -> None:
    """Torch warned that parts of the image are no leaves; tests turn warnings into errors."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, padding=1).double()
    x, target = (torch.rand(2, 3, 7, 9, dtype=torch.float64), torch.randint(4, (2, 7, 9)))
    plain, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    nn.functional.cross_entropy(model(plain), target).backward()
    mural.parallelize(model, mural.Plan(microbatches=2, schedule="gpipe")).step(ours, target)
    assert torch.allclose(ours.grad, plain.grad, rtol=1e-12, atol=0.0)
