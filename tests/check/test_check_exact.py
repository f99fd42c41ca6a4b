"""No false alarms: plans that are exact pass, whatever the model, the type, and however rounding grows."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from check_models import BOTH, MODELS, SPATIAL, STAGES, built
from check_models import entropy as first_entropy
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import image
from mural import Plan
from mural.check import Comparison
from mural.check.leaves import gap, leaves, matching
from mural.engine.result_tiles import ResultTile
from mural.geometry import Interval
from mural.models import UNet
from ranks import only, run_on
from zoo import monai

TYPES = {"float32": torch.float32, "float64": torch.float64}


def third_party(name: str, dtype: str) -> tuple[Comparison, float]:
    model, x, target = built(name, TYPES[dtype])
    found = mural.check(model, MODELS[name][2], x, target, first_entropy)
    return found, max(row.excess for row in found.rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_third_party_models_raise_no_alarm(name: str, dtype: str) -> None:
    world = MODELS[name][2].devices
    only(world)
    (found, excess), *_ = run_on(world, third_party, name, dtype)
    print(f"{name} {dtype}: {excess:.3f} of what rounding explains; {dict(found)}")
    assert found.exact, str(found)
    if dtype == "float64":
        assert max(found.values()) < 1e-10


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "UNet":
        return UNet(width=4, depth=2)
    return monai(
        "UNet", 2, 3, 2, channels=(4, 8), strides=(2,), norm="BATCH" if name == "MONAI batch" else "INSTANCE"
    )()


def readme(name: str, plan: Plan, dtype: str) -> Comparison:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.rand(2, 3, 64, 48, generator=generator), torch.randint(2, (2, 64, 48), generator=generator)
    return mural.check(made(name).to(TYPES[dtype]), plan, x.to(TYPES[dtype]), target)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("UNet", SPATIAL),
        pytest.param("UNet", BOTH, marks=pytest.mark.slow),
        ("UNet", STAGES),
        ("MONAI batch", SPATIAL),
        pytest.param("MONAI instance", STAGES, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_biases_before_norms_raise_no_alarm(name: str, plan: Plan, dtype: str) -> None:
    """Their gradients are zero, of which each run has rounding errors of its own."""
    for found in run_on(plan.devices, readme, name, plan, dtype):
        assert found.exact, str(found)
        assert found["gradients"] < (1e-10 if dtype == "float64" else 1e-3)


class Odd(nn.Module):
    """What models do besides: parameters without gradients, constants, counters, complex and empty results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 3, 1)
        self.unused, self.frozen = nn.Linear(3, 2), nn.Conv2d(2, 4, 1).requires_grad_(False)
        self.dropout = nn.Dropout2d(0.2)
        self.register_buffer("huge", torch.tensor([-1e9, float("inf"), float("nan")]))
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        y = self.dropout(torch.relu(self.norm(self.first(x) + self.frozen(x))))
        z = self.head(y)
        return {"out": z, "classes": z.argmax(1), "none": None, "empty": y.new_zeros(0, 3), "name": "odd", "n": 2}


def entropy(result: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(result["out"], target)


def odd(plan: Plan, dtype: str, training: bool, zero: bool) -> Comparison:
    torch.manual_seed(3)
    model = Odd().to(TYPES[dtype]).train(training)
    model.norm.eval()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before, random = deepcopy(model.state_dict()), torch.get_rng_state()
    target = torch.randint(0, 3, (2, 20, 18), generator=torch.Generator().manual_seed(0))
    x = image(2, 2, 20, 18).to(TYPES[dtype])
    found = mural.check(model, plan, x * (not zero), target, zero_loss if zero else entropy)
    after = model.state_dict()
    assert all(torch.equal(a.nan_to_num(), after[name].nan_to_num()) for name, a in before.items())
    assert [m.training for m in model.modules()] == [training, training, False, *[training] * 4]
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["first.weight"]
    assert torch.equal(random, torch.get_rng_state())
    return found


def zero_loss(result: Any, target: Tensor) -> Tensor:
    return (result["out"] * 0).sum()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", [(True, False), (False, False), (True, True)], ids=["train", "eval", "zero"])
def test_odd_models_raise_no_alarm_and_stay_as_they_are(case: tuple[bool, bool], dtype: str) -> None:
    for found in run_on(2, odd, SPATIAL, dtype, *case):
        assert found.exact, str(found)
        assert set(found) == {"output", "loss", "gradients", "buffers"}
        assert max(found.values()) < (1e-10 if dtype == "float64" else 1e-4)


def drawing(plan: Plan) -> Comparison:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(4, 3, 1)
    )
    target = torch.randint(0, 3, (2, 20, 18), generator=torch.Generator().manual_seed(0))
    return mural.check(net, plan, image(2, 2, 20, 18).float(), target)


RANDOM = [
    Plan(data=2), SPATIAL, STAGES, Plan(stage=2, microbatches=2, batchnorm="micro", schedule="1f1b"),
    Plan(data=2, precision="bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("plan", RANDOM, ids=str)
def test_random_layers_raise_no_alarm(plan: Plan) -> None:
    for found in run_on(2, drawing, plan):
        assert found.exact, str(found)
        assert "3 drew random numbers" in str(found)


class Wild(nn.Module):
    """A model in which rounding grows by orders of magnitude from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.first(x))
        for _ in range(12):
            y = 3.9 * y * (1 - y)
        return self.head(F.max_pool2d(y, 2))


PLANS = [
    Plan(data=2), SPATIAL, STAGES, Plan(microbatches=2, spatial=(1, 2)),
    Plan(stage=2, microbatches=2, schedule="gems"), Plan(channel=2, channel_layers="all"),
    Plan(spatial=(2, 1), precision="bfloat16"), Plan(stage=2, precision="bfloat16"),
]  # fmt: skip


def wild(plan: Plan, dtype: str) -> Comparison:
    torch.manual_seed(3)
    target = torch.randint(0, 3, (2, 16, 16), generator=torch.Generator().manual_seed(0))
    return mural.check(Wild().to(TYPES[dtype]), plan, image(2, 2, 32, 32).to(TYPES[dtype]), target)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_rounding_that_grows_raises_no_alarm(plan: Plan) -> None:
    for found in run_on(2, wild, plan, "float32"):
        assert found.exact, str(found)


def test_tiles_of_a_result_are_compared_with_their_box_of_the_whole() -> None:
    whole = torch.randn(2, 3, 8, 9, generator=torch.Generator().manual_seed(0))
    place = (Interval(1, 2), Interval(0, 3), Interval(2, 6), Interval(5, 9))
    tile = ResultTile(whole[1:2, :, 2:6, 5:9].clone(), None, place)
    ((where, value),) = leaves(tile)
    assert (where, gap(*matching(value, whole, None)).size) == ("", 0.0)
    tile.output[0, 0, 0, 0] += 0.5
    assert gap(*matching(tile, whole, None)).size == pytest.approx(0.5)
