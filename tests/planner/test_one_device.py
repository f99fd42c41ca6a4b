"""`mural.plan` for one device: what fits and is fastest, or an error that says what would be needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import mural
from mural.cli import app
from mural.cost.hardware import Hardware
from mural.engine.division import Division
from mural.engine.fitting_tile import foreseen_step
from mural.engine.parallel import Parallel
from mural.engine.stage_ranks import StageRanks
from mural.models import UNet
from mural.planner import memory_mix, one_device
from mural.ranks import Mesh

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
        number, unit, milliseconds = line.split()[1:4]
        peak = mural.plans.bytes_of(number + unit)
        assert peak <= 0.93 * mural.plans.bytes_of(memory) + 2**23
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


def test_a_streamed_step_is_within_the_limit_with_what_the_optimizer_keeps() -> None:
    """It fills what it finds, and Adam's numbers were added to that: 629 MiB were planned for a limit of 600."""
    model, loss = nn.Linear(2**10, 2**10), nn.functional.cross_entropy
    question = memory_mix.MixQuestion(model, loss, [], Hardware.named("h200"), 100 * 2**20, numbers=2.0)
    small, full = (memory_mix.Mix(size * 2**20, 1.0, stream=(64, 64)) for size in (90, 95))
    there, away = question.beside_numbers(small), question.beside_numbers(full)
    assert (there.peak, there.seconds, there.kinds) == (small.peak + question.kept_numbers, 1.0, ())
    assert (away.peak, away.kinds) == (full.peak, ("optimizer",))
    assert away.seconds == pytest.approx(1.0 + question.kept_numbers / 5.5e10)
    assert str(away) == "streamed in tiles of 64 × 64, the optimizer's numbers on the host"


def test_no_tile_is_looked_for_where_streaming_is_too_slow_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for it took most of the time, for the same plan and the same explanation."""
    monkeypatch.setattr(one_device, "SHOWN", 4)
    asked: list[Any] = []
    found = one_device.fitting_tile
    monkeypatch.setattr(one_device, "fitting_tile", lambda *args, **more: asked.append(args) or found(*args, **more))
    short = mural.plan(net(), SIZE, memory="260MiB", precision="bfloat16")
    assert not asked
    monkeypatch.setattr(one_device, "least_seconds", lambda *_: 0.0)
    whole = mural.plan(net(), SIZE, memory="260MiB", precision="bfloat16")
    assert asked
    assert (short, short.explain()) == (whole, whole.explain())


@pytest.mark.parametrize("tile", [(64, 64), (128, 128), (256, 256), (512, 256)])
@pytest.mark.parametrize("norm", [True, False])
def test_smaller_tiles_are_slower(tile: tuple[int, int], norm: bool) -> None:
    """What rests on it: a step with one tile has the fewest seconds of all."""
    torch.manual_seed(0)
    model = (
        UNet(width=8, depth=2) if norm else nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1))
    )
    given: list[memory_mix.Given] = [((1, 3, 512, 512), torch.float32), ((1, 512, 512), torch.int64)]
    question = memory_mix.MixQuestion(model, nn.functional.cross_entropy, given, Hardware.named("h200"), 2**30)
    mesh, asked = Mesh.of_one(), mural.Plan(stream=tile)
    held = Parallel(model, asked, mesh, question.loss, 0, Division.whole(model, StageRanks.of(asked, mesh)))
    step = foreseen_step(held, given, tile, memory=question.limit)
    assert 0 < one_device.least_seconds(held, question, "h200") <= (step.cost.seconds() or 0)


GIB = 2**30
KEEPS = memory_mix.Mix(7 * GIB, 1.05, ("a",))
SENDS = memory_mix.Mix(7 * GIB, 1.0, offload=True, moved=14 * GIB)
SENDS_LESS = memory_mix.Mix(7 * GIB, 1.01, ("a", "b"), offload=True, moved=GIB)


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ([SENDS, KEEPS], KEEPS),
        ([SENDS, SENDS_LESS, KEEPS], SENDS_LESS),
        ([memory_mix.Mix(7 * GIB, 0.9, offload=True, moved=14 * GIB), KEEPS], 0),
        ([*[SENDS] * 9, KEEPS], KEEPS),
    ],
    ids=["keeps", "sends less", "much faster", "many others"],
)
def test_copies_may_come_late(
    monkeypatch: pytest.MonkeyPatch, found: list[memory_mix.Mix], best: memory_mix.Mix | int
) -> None:
    """Of plans that differed by 1.6%, one that sent 14.5 GiB to the host was taken, and was 11% slower.

    And an explanation of eight lines did not show what was chosen, where that was the ninth.
    """
    model, loss = nn.Conv2d(3, 2, 1), nn.functional.cross_entropy
    question = memory_mix.MixQuestion(model, loss, [((1, 3, 8, 8), torch.float32)], Hardware.named("h200"), 8 * GIB)
    monkeypatch.setattr(one_device, "considered", lambda *_: found)
    made = one_device.answered(question, "8GiB", "h200", "float32")
    best = found[best] if isinstance(best, int) else best
    assert (made.recompute, made.offload) == (best.recompute, best.kinds)
    marked = [line for line in made.explain().splitlines() if line.startswith("→ ")]
    assert len(marked) == 1
    assert str(best) in marked[0]


def test_where_nothing_fits_it_says_what_would() -> None:
    """Bytes had one decimal of a GiB: «nothing fits into 0.2 GiB … needs 0.2 GiB … has 0.2»."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2048), nn.Linear(2048, 2))
    with pytest.raises(mural.MuralError, match=r"nothing fits into 100 MiB: .* needs \d+ MiB .* has 93\.0 MiB"):
        mural.plan(model, (3, 64, 64), memory="100MiB", target=())
    with pytest.raises(mural.MuralError, match=r"nothing fits into 977 KiB"):
        mural.plan(net(), SIZE, memory="1MB")
    with pytest.raises(mural.MuralError, match="one device"):
        mural.plan(net(), SIZE, devices=8, memory="16GiB")


@pytest.mark.parametrize("numbers", [0, 2])
@pytest.mark.parametrize(("model", "image", "memory"), [
    (nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2048), nn.Linear(2048, 2)), (3, 64, 64), "100MiB"),
    (UNet(width=8, depth=3), (3, 64, 64), "1MiB"),
    (nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 2, 1)), (3, 1024, 1024), "70MiB"),
    pytest.param(
        nn.Sequential(nn.Flatten(), nn.Linear(2**16, 2**12), nn.Linear(2**12, 2)), (1, 256, 256), "1GiB",
        marks=pytest.mark.slow,
    ),
], ids=["linear", "unet", "activations", "more than a GiB"])  # fmt: skip
def test_the_memory_that_it_says_is_enough(model: nn.Module, image: Sequence[int], memory: str, numbers: int) -> None:
    """And not much more than that: with a few percent less, nothing fits, or tiles alone."""
    with pytest.raises(mural.MuralError) as refused:
        mural.plan(model, image, memory=memory, optimizer=numbers)
    found = re.search(r'memory="([^"]+)" would do', str(refused.value))
    assert found
    assert mural.plan(model, image, memory=found[1], optimizer=numbers).memory == found[1]
    less = str(int(0.95 * mural.plans.bytes_of(found[1])))
    with suppress(mural.MuralError):
        assert mural.plan(model, image, memory=less, optimizer=numbers).stream is not None


@given(st.floats(1, 2**52))
def test_memory_in_words_is_enough(size: float) -> None:
    assert size <= mural.plans.bytes_of(mural.plans.memory_for(size)) <= 1.01 * size + 2**20


CONV = nn.Conv2d(3, 2, 3, padding=1)
FROZEN = nn.Conv2d(3, 2, 3).requires_grad_(False)


@pytest.mark.parametrize(("changed", "message"), [
    ({"memory": 2**30}, r'memory = 1073741824: write a text with its unit, as memory="1.00GiB"'),
    ({"memory": 1.5}, r'memory = 1\.5: write a text'),
    ({"memory": "0GiB"}, "memory = '0GiB' is less than a byte"),
    ({"memory": "16G"}, "memory = '16G': 'G' is no unit; .* as in \"16GiB\""),
    ({"memory": "lots"}, "memory = 'lots': write a number of bytes with its unit"),
    ({"image": ()}, r"image = \(\): give the shape of one image, channels first, as \(3, 512, 512\)"),
    ({"image": 64}, r"image = 64: give a shape of whole numbers of at least 1, as \(3, 512, 512\)"),
    ({"image": "3,64,64"}, "image = '3,64,64': give a shape"),
    ({"image": (3, 64.0, 64)}, r"image = \(3, 64\.0, 64\): give a shape"),
    ({"image": (3, 0, 64)}, r"image = \(3, 0, 64\): give a shape"),
    ({"target": 64}, r"target = 64: give a shape .* or \(\) for a class"),
    ({"model": nn.Conv2d}, r"the model is the class Conv2d: give a module, as Conv2d\(…\)"),
    ({"model": torch.relu}, "the model is a builtin_function_or_method: give a torch.nn.Module"),
    ({"model": nn.ReLU()}, "ReLU has no parameters: there is no step"),
    ({"model": FROZEN}, r"all 2 parameters of Conv2d are frozen, .* requires_grad_\(True\)"),
    ({"optimizer": "adam"}, "optimizer = 'adam': give how many numbers .*: 2 for Adam"),
    ({"optimizer": -1}, "optimizer = -1: give how many"),
    ({"optimizer": float("nan")}, "optimizer = nan: give how many"),
    ({"batch": 0}, "batch = 0: give a whole number of images"),
    ({"batch": 1.5}, r"batch = 1\.5: give a whole number of images"),
    ({"precision": "float16"}, "precision = 'float16' is not one of"),
])  # fmt: skip
def test_what_cannot_be_planned(changed: dict[str, Any], message: str) -> None:
    """Some of these were TypeErrors and AttributeErrors, and some gave a plan."""
    asked: dict[str, Any] = {"model": CONV, "image": (3, 64, 64), "memory": "1GiB"}
    with pytest.raises(mural.MuralError, match=message) as refused:
        mural.plan(**asked | changed)
    assert len(str(refused.value)) < 200


def test_a_parallelized_model_is_no_model_to_plan_for() -> None:
    parallel: Any = mural.parallelize(nn.Conv2d(3, 2, 3), mural.Plan())
    with pytest.raises(mural.MuralError, match="give the module that it was made of"):
        mural.plan(parallel, (3, 64, 64), memory="1GiB")


def test_sizes_of_numpy_and_large_units_are_taken() -> None:
    assert mural.plan(CONV, np.array([3, 64, 64]).tolist(), batch=np.int64(2), memory="1PiB").memory == "1PiB"  # type: ignore[arg-type]


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


@pytest.mark.parametrize("error", [AssertionError, KeyError, AttributeError, ZeroDivisionError])
def test_whatever_a_model_raises_is_told(error: type[Exception]) -> None:
    """Vision transformers raise AssertionErrors for images of another size: mural.plan did not catch them."""

    class Picky(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise error("expected 224 but got 256")

    with pytest.raises(mural.MuralError, match=rf"one step on 1 images .* raises {error.__name__}: .*expected 224"):
        mural.plan(Picky(3, 2, 3), (3, 256, 256), memory="1GiB")


def test_an_optimizer_keeps_nothing_for_what_is_frozen() -> None:
    """It was thought to keep numbers for all parameters: with a frozen backbone, the peak was predicted too high."""
    head = nn.Linear(1024, 2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 4096).requires_grad_(False), nn.Linear(4096, 1024), head)
    given: list[memory_mix.Given] = [((1, 1, 32, 32), torch.float32), ((1,), torch.int64)]
    plain, adam = (
        memory_mix.MixQuestion(model, nn.functional.cross_entropy, given, Hardware.named("h200"), 2**30, numbers=n)
        for n in (0.0, 2.0)
    )
    wanted = 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert adam.kept_numbers == wanted
    assert max(adam.trace().bytes) - max(plain.trace().bytes) == wanted


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
