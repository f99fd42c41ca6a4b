"""The model and the plan of a first run: arguments by their names, padding that is needed, plans for machines."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mural.cost.hardware import GIB
from mural.errors import ConfigError, PlanError
from mural.plans import Plan
from mural.survey import machine_plan
from mural.survey.machine_plan import Machine, planned
from mural.survey.model_choice import Task, chosen_model

TASK = Task(3, [(64, 64)], 2)
LAPTOP, SERVER = Machine((), 8, 16 * GIB), Machine([("GPU", 8 * GIB)] * 4, 32, 64 * GIB)
HERE = "test_model_and_plan"


class Strided(nn.Module):
    """Needs extents that are multiples of 8."""

    def __init__(self, in_ch: int, n_classes: int):
        super().__init__()
        self.down = nn.Conv2d(in_ch, 4, 8, stride=8)
        self.up = nn.ConvTranspose2d(4, n_classes, 8, stride=8)

    def forward(self, image: Tensor) -> Tensor:
        return self.up(self.down(image))


def needy(in_channels: int, features: int) -> nn.Module:
    return nn.Conv2d(in_channels, features, 1)


def broken(**_: Any) -> nn.Module:
    raise RuntimeError("no weights")


def test_a_unet_gets_its_arguments_from_the_data() -> None:
    found = chosen_model(Task(1, [(20, 40, 40)], 3))
    assert found.arguments == {"dims": 3, "in_channels": 1, "classes": 3, "width": 16, "depth": 3}
    assert (found.stride, found.multiple) == (8, 1)
    assert "it takes them as they are" in found.odd[0]


@pytest.mark.parametrize("side", [2, 3, 5, 16, 100])
def test_a_unet_of_any_side_can_be_trained(side: int) -> None:
    found = chosen_model(Task(3, [(side, side)], 2))
    assert found.made is not None


def test_padding_is_found_by_trying() -> None:
    found = chosen_model(Task(1, [(30, 41), (64, 64)], 3), f"{HERE}:Strided")
    assert found.arguments == {"in_ch": 1, "n_classes": 3}
    assert (found.multiple, found.stride) == (8, 8)
    assert "data.multiple = 8 pads them" in found.odd[0]


def test_arguments_that_are_given_come_first_and_missing_ones_are_named() -> None:
    assert chosen_model(TASK, given={"width": 5}).arguments["width"] == 5
    found = chosen_model(TASK, f"{HERE}:needy")
    assert found.made is None
    assert "needs features" in found.odd[0]
    assert chosen_model(TASK, f"{HERE}:needy", {"features": 2}).made is not None


def test_a_model_that_does_not_fit_is_said_to() -> None:
    assert "it gives 5×64×64" in chosen_model(TASK, f"{HERE}:needy", {"features": 5}).odd[0]
    assert "no weights" in chosen_model(TASK, f"{HERE}:broken").odd[0]
    with pytest.raises(ConfigError, match="--model"):
        chosen_model(TASK, "mural.models:Unett")


def test_classes_of_images_get_a_classifier() -> None:
    found = chosen_model(Task(3, [(20, 30)], 4, whole_images=True))
    assert found.factory == "mural.models:CNN2D"
    assert found.arguments["classes"] == 4


def plan_for(machine: Machine, task: Task, images: int = 20) -> machine_plan.MachinePlan:
    return planned(machine, chosen_model(task, given={"width": 4, "depth": 2}), task, images)


def test_what_fits_is_not_divided() -> None:
    found = plan_for(LAPTOP, TASK)
    assert (found.plan, found.batch, found.odd) == (Plan(), 4, ())
    assert "0.1 of 12.8 GiB" in found.why


def test_images_of_several_sizes_come_one_at_a_time() -> None:
    assert plan_for(LAPTOP, Task(3, [(64, 64), (70, 70)], 2)).batch == 1


def test_what_does_not_fit_is_streamed() -> None:
    small = Machine((), 2, 2**28)
    found = plan_for(small, Task(3, [(1500, 1500)], 2))
    assert found.plan.stream is not None
    assert found.plan.devices == 1


def test_several_gpus_share_batches_of_small_images_and_cut_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_plan, "plan", lambda *_args, **_more: Plan())
    found = plan_for(SERVER, TASK)
    assert (found.plan.data, found.plan.spatial, found.batch) == (4, (), 4)
    found = plan_for(SERVER, Task(3, [(4000, 4000), (3000, 3000)], 2))
    assert (found.plan.data, found.plan.spatial, found.batch) == (1, (2, 2), 1)
    assert plan_for(SERVER, Task(3, [(64, 64), (80, 80)], 2)).plan == Plan()


@pytest.mark.parametrize("trouble", ["late", "nothing fits", "offload"])
def test_without_a_plan_of_the_planner_a_rule_gives_tiles(monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    def asked(*_: Any, **__: Any) -> Plan:
        if trouble == "late":
            time.sleep(5)
        if trouble == "nothing fits":
            raise PlanError("nothing fits")
        return Plan(offload=("activations",))

    monkeypatch.setattr(machine_plan, "plan", asked)
    monkeypatch.setattr(machine_plan, "SECONDS", 0.05)
    found = plan_for(LAPTOP, Task(3, [(3000, 900)], 2))
    assert found.plan == Plan(stream=(1024, 900))
    assert "by a rule" in found.odd[0]
    assert "data.crop = [512, 512]" in found.odd[0]


def test_this_machine_has_memory() -> None:
    found = machine_plan.this_machine()
    assert found.limit > 0
    assert (len(found.gpus) > 0) == torch.cuda.is_available()
