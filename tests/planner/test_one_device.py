"""`mural.plan` for one device: what fits and is fastest, or an error that says what would be needed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import mural
from mural.cli import app
from mural.cost.hardware import Hardware
from mural.models import UNet
from mural.planner import memory_mix

SIZE = (3, 512, 512)


def net() -> nn.Module:
    torch.manual_seed(0)
    return UNet(width=16, depth=3)


@cache
def planned(memory: str) -> mural.Plan:
    return mural.plan(net(), SIZE, memory=memory, precision="bfloat16")


def test_what_fits_is_kept() -> None:
    found = planned("2GiB")
    assert (found.recompute, found.offload, found.stream) == ((), (), None)
    assert "everything kept" in found.explain()


def test_less_memory_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(memory_mix.LEAST, "cuda", 2**16)
    planned.cache_clear()
    seen: list[float] = []
    for memory in ("2GiB", "330MiB", "260MiB"):
        found = planned(memory)
        line = next(line for line in found.explain().splitlines() if line.startswith("→"))
        peak, milliseconds = line.split()[1:3]
        assert float(peak) * 2**30 <= 0.93 * mural.plans.bytes_of(memory) + 2**23
        seen.append(float(milliseconds))
    assert seen == sorted(seen)
    assert found.recompute or found.offload or found.stream


def test_plans_run_and_give_the_same_result() -> None:
    image, target = torch.randn(1, 3, 64, 64, dtype=torch.float64), torch.ones(1, 64, 64).long()
    losses = {
        mural.parallelize(net().double(), plan).step(image, target).item()
        for plan in (mural.Plan(), mural.Plan(recompute=planned("330MiB").recompute, offload=("activations",)))
    }
    assert len(losses) == 1


def test_a_streamed_step_fits_however_much_it_fills_of_the_rest() -> None:
    """Its tile is chosen for what tensors may take; with a little more it was thrown away: «needs 5.6 GiB, has 5.6»."""
    assert memory_mix.Mix(100, 1.0, stream=(64, 64)).fits(99)
    assert memory_mix.Mix(99, 1.0).fits(99)
    assert not memory_mix.Mix(100, 1.0).fits(99)


def test_where_nothing_fits_it_says_what_would() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2048), nn.Linear(2048, 2))
    with pytest.raises(mural.MuralError, match=r"nothing fits into 0\.1 GiB: .* needs \d+\.\d GiB"):
        mural.plan(model, (3, 64, 64), memory="100MiB", target=())
    with pytest.raises(mural.MuralError, match=r"nothing fits into 0\.0 GiB"):
        mural.plan(net(), SIZE, memory="1MB")
    with pytest.raises(mural.MuralError, match="one device"):
        mural.plan(net(), SIZE, devices=8, memory="16GiB")


def test_an_optimizer_that_does_not_fit_keeps_its_numbers_on_the_host() -> None:
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(1024, 1024, bias=False) for _ in range(24)), nn.Linear(1024, 2))
    plain = mural.plan(model, (1, 32, 32), memory="1GiB", target=(), optimizer=2)
    found = mural.plan(model, (1, 32, 32), memory="320MiB", target=(), optimizer=2)
    assert plain.offload == ()
    assert found.offload == ("optimizer",)
    assert "the optimizer's numbers on the host" in found.explain()


def test_on_a_cpu_small_blocks_leave() -> None:
    """As they do in its steps; a GPU's least block was asked for, and small steps did not fit."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(8)))

    def question(hardware: str) -> memory_mix.MixQuestion:
        given = [((64, 256), torch.float32), ((64,), torch.int64)]
        return memory_mix.MixQuestion(model, nn.functional.cross_entropy, given, Hardware.named(hardware), 0)

    moved = {name: question(name).swaps(question(name).trace()).everything().moved[0] for name in ("h200", "cpu")}
    assert moved["cpu"] > 8 * 64 * 256 * 4 // 2 > moved["h200"] == 0


def test_an_image_that_the_model_does_not_take() -> None:
    with pytest.raises(mural.MuralError, match=r"one step on 1 images of shape \(3, 512\) .* raises ValueError"):
        mural.plan(net(), (3, 512), memory="1GiB")


@pytest.mark.parametrize(("model", "image"), [
    (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)), (3, 32, 32)),
    (nn.Conv2d(3, 4, 5, stride=2), (3, 33, 47)),
    (nn.Conv3d(1, 4, 3), (1, 9, 8, 7)),
], ids=["classes of images", "a smaller result", "volumes"])  # fmt: skip
def test_targets_are_those_of_the_models_result(model: nn.Module, image: tuple[int, ...]) -> None:
    """A classifier was refused: the default was a class for each pixel of the image."""
    assert mural.plan(model, image, batch=2, memory="1GiB").memory == "1GiB"


def test_the_command_prints_and_writes_it(tmp_path: Path) -> None:
    called = ["plan", "mural.models:UNet", "--arguments", "width = 4, depth = 2", "--image", "3,64,64"]
    found = CliRunner().invoke(app, [*called, "--memory", "1GiB", "--output", str(tmp_path / "plan.toml")])
    assert found.exit_code == 0, found.output
    assert "everything kept" in found.output
    assert mural.Plan.load(tmp_path / "plan.toml").memory == "1GiB"


def test_a_plan_by_hand_has_no_reasons() -> None:
    assert "by hand" in mural.Plan().explain()
    assert planned("2GiB") == mural.Plan(memory="2GiB", precision="bfloat16")
