"""The benchmark of context: its images, what can be told from a window, its trainings, and a run at toy size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from context.bounds import balanced, best, distances, reach, shown, sums, windows
from context.cases import QUICK, Arm, Run, Settings
from context.evaluation import on_tiles, on_whole
from context.grid import chosen, sweep
from context.scene import PALE_DARK, Scene, scenes
from context.training import Engine, Training, picks, take
from harness.results import read
from torch import nn

import mural

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scene() -> Scene:
    return scenes(6, 128, seed=5, device=CPU)


def test_a_seed_gives_the_same_images_and_another_seed_others(scene: Scene) -> None:
    again, other = scenes(6, 128, seed=5, device=CPU), scenes(6, 128, seed=6, device=CPU)
    assert torch.equal(scene.image, again.image)
    assert torch.equal(scene.answers, again.answers)
    assert not torch.equal(scene.answers, other.answers)


def test_all_nuclei_of_a_lobule_have_one_hilum_and_one_grade(scene: Scene) -> None:
    for image in range(len(scene.image)):
        for number in scene.lobule[image].unique().tolist():
            if number >= 0:
                here = scene.lobule[image] == number
                assert len(scene.answer("hilum")[image][here].unique()) == 1
                assert len(scene.answer("grade")[image][here].unique()) == 1
                assert (scene.hilum[image] == number).any()


def test_nuclei_look_as_their_own_answer_says(scene: Scene) -> None:
    there = scene.owner >= 0
    down, right = scene.centre[there].T
    image = there.nonzero()[:, 0]
    dark = scene.answer("own")[image, down, right] == 2
    threshold = sum(PALE_DARK) / 2
    assert ((scene.density[there] > threshold) == dark).float().mean() > 0.9
    red = scene.image[image, down, right, 0].float()
    assert red[dark].mean() < red[~dark].mean() - 20


def test_windows_are_the_tiles_that_cover_a_position_within_its_reach() -> None:
    size, patch, distance = 48, 16, 10
    seen = windows(size, patch, distance)
    values = torch.rand(1, size, size, dtype=torch.float64)
    summed = sums(values, seen)
    for i, j in ((0, 0), (7, 20), (47, 31)):
        rows, columns = (
            {k for start in range(0, size - patch + 1, patch // 2) if start <= at < start + patch
             for k in range(start, start + patch) if abs(k - at) <= distance}
            for at in (i, j)
        )  # fmt: skip
        expected = sum(float(values[0, r, c]) for r in rows for c in columns)
        assert float(summed[0, i, j]) == pytest.approx(expected)


def test_the_reach_is_that_of_two_dims_too() -> None:
    model = mural.models.UNet(in_channels=1, classes=1, width=1, depth=2, norm=None)
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 0.5)
    with torch.no_grad():
        image = torch.zeros(4, 1, 96, 96)
        image[range(4), 0, range(48, 52), 48] = 1.0
        found = (model(image)[:, 0] > 0).nonzero()
    assert max(int((row - 48 - k).abs()) for k, row, _ in found) == reach(2)


def test_less_is_told_by_smaller_windows_and_all_by_the_whole() -> None:
    many = scenes(48, 128, seed=5, device=CPU)
    far = distances(many)
    everything = shown(many, "hilum", windows(128, 128, 128))
    assert bool((everything[many.lobule >= 0] == 1).all())
    whole, half, least = (best(many, Arm("hilum", 3, patch), far)["accuracy"] for patch in (128, 32, 16))
    assert whole > half > least > 0.5
    # Lobules are small here, and their nuclei few: only far smaller windows tell surely less of the grade.
    whole, least = (best(many, Arm("grade", 3, patch), far)["accuracy"] for patch in (128, 8))
    assert whole > least + 0.02 > 0.52
    near = best(many, Arm("hilum", 2, 128), far)["by_distance"]
    assert near[0] > 0.7
    assert near[1] == 0.5  # over 32 pixels away, but the reach is 23


def test_the_observer_of_a_window_sees_the_hilum_or_guesses(scene: Scene) -> None:
    chance = shown(scene, "hilum", windows(128, 128, 20))
    image, row, column = (int(v) for v in (scene.lobule >= 0).nonzero()[100])
    box = scene.hilum[image, max(0, row - 20) : row + 21, max(0, column - 20) : column + 21]
    assert chance[image, row, column] == (1.0 if bool((box == scene.lobule[image, row, column]).any()) else 0.5)


def test_a_constant_guess_is_worth_one_half() -> None:
    answer = torch.tensor([1] * 9 + [2])
    assert balanced((answer == 1).float(), answer) == 0.5


def test_every_arm_sees_as_many_pixels() -> None:
    settings = Settings()
    seen = {picks(settings, Run("own", 2, patch, 1e-3, 0)).shape[1] * patch**2 for patch in settings.patches}
    assert seen == {settings.images * settings.size**2}
    whole = picks(replace(settings, steps=settings.pool // settings.images), Run("own", 2, settings.size, 1e-3, 0))
    assert len(whole[..., 0].unique()) == settings.pool


def test_the_rate_with_the_best_mean_on_validation_images_is_chosen() -> None:
    settings = replace(QUICK, tries=2, rates=(1e-3, 2e-3))
    # The larger rate has one lucky seed, the smaller one the better mean; on tiles, as both are worse run whole.
    accuracy = {(1e-3, 0): 0.8, (1e-3, 1): 0.8, (2e-3, 0): 0.9, (2e-3, 1): 0.5}
    records = [
        {
            "case": run.encode(),
            "validation": {"whole": {"accuracy": 0.4}, "tiles": {"accuracy": accuracy[run.rate, run.seed]}},
        }
        for run in sweep(settings)
    ]
    assert chosen(settings, records) == dict.fromkeys(settings.arms, 1e-3)


def test_tiles_of_a_pointwise_model_give_what_the_whole_image_gives(scene: Scene) -> None:
    model = nn.Conv2d(3, 3, 1)
    assert torch.allclose(on_tiles(model, scene.image[:2], 32), on_whole(model, scene.image[:2]), atol=1e-6)


def test_whole_images_train_the_same_through_mural_as_in_plain_torch() -> None:
    settings = replace(QUICK, steps=3)
    pool = scenes(settings.pool, settings.size, 1, CPU)
    ends: list[torch.Tensor] = []
    for mesh in (None, mural.init(spatial=(1, 1))):
        training = Training(settings, Run("hilum", 2, 64, 1e-3, 0), pool, Engine(dtype=torch.float64, mesh=mesh))
        take([training], settings.steps)
        ends.append(torch.cat([p.detach().flatten() for p in training.model.parameters()]))
    assert torch.allclose(*ends, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_it_runs_at_toy_size_and_writes_its_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns(".venv", "__pycache__"))
    script, output = tmp_path / "benchmarks" / "context" / "run.py", tmp_path / "toy.jsonl"
    for arguments in (
        ("--quick", "--device", "cpu", "--output", str(output)),
        ("--collect", str(output)),
        ("--page",),
    ):
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    records = read(output)
    arms, seeds = len(QUICK.arms), QUICK.seeds - QUICK.tries
    assert sum(r["kind"] == "run" for r in records) == arms * (len(QUICK.rates) * QUICK.tries + seeds)
    assert sum(r["kind"] == "bound" for r in records) == arms
    curve = next(r for r in records if r["kind"] == "curve" and r["name"] == "2 ranks")
    assert curve["difference"] < 1e-10
    assert curve["parameters"] < 1e-10
    assert str(tmp_path) not in json.dumps(records)
    text = (script.parent / "README.md").read_text()
    assert "| hilum | 23 | 32² (1/2) |" in text
    assert "| 2 ranks |" in text
    assert (script.parent / "figures" / "hilum.png").stat().st_size > 10_000
