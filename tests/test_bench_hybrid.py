"""The benchmark of data, model and hybrid parallelism: its crops, its counters, a toy run, and the page from that."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = ("averaged_errors", "counting", "crops", "problems", "published", "sending")


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's modules; other benchmarks have some of the same names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "hybrid"))
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    yield __import__
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_no_pixel_is_in_a_training_crop_and_in_a_test_crop(hybrid: Any) -> None:
    crops = hybrid("crops")
    picture = np.zeros((400, 600, 3), np.uint8)
    seen = np.zeros((2, 400, 600), bool)
    for test in (False, True):
        for top, left in crops.squares(picture, test):
            seen[int(test), top : top + crops.SQUARE, left : left + crops.SQUARE] = True
    assert not (seen[0] & seen[1]).any()
    assert 0.2 < seen[1].sum() / seen.sum() < 0.3


def test_crops_are_of_the_images_that_are_here(hybrid: Any) -> None:
    pytest.importorskip("sklearn")
    crops = hybrid("crops")
    found, again = crops.cut(3, test=True, seed=0), crops.cut(3, test=True, seed=0)
    assert found.pixels.shape == (3 * len(crops.pictures()), 3, 32, 32)
    assert torch.equal(found.pixels, again.pixels)
    assert not torch.equal(found.pixels, crops.cut(3, test=False, seed=0).pixels)
    assert found.labels.bincount().tolist() == [3] * len(crops.pictures())


def test_averaged_errors_are_the_gradient_of_the_batch_only_for_equal_images(hybrid: Any) -> None:
    errors, problems = hybrid("averaged_errors"), hybrid("problems")
    model = problems.seeded(lambda: problems.QuickNet(4)).double()
    images, labels = torch.rand(4, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    true = errors.gradient(model, errors.of_batch(model, images, labels))
    theirs = errors.gradient(model, errors.of_errors(model, images, labels, nodes=2))
    assert (theirs - true).norm() > 0.01 * true.norm()
    same, twice = images[:2].repeat(2, 1, 1, 1), labels[:2].repeat(2)
    true = errors.gradient(model, errors.of_batch(model, same, twice))
    theirs = errors.gradient(model, errors.of_errors(model, same, twice, nodes=2))
    assert (theirs - true).norm() < 1e-12 * true.norm()


def bench(folder: Path, *arguments: str) -> str:
    """What the benchmark's script printed."""
    command = [sys.executable, str(folder / "hybrid" / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_benchmark_at_toy_size_and_its_page(tmp_path: Path, hybrid: Any) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__", "results"))
    here = tmp_path / "benchmarks" / "hybrid"
    bench(tmp_path / "benchmarks", "--quick", "--device", "cpu", "--output", str(here / "results"))
    records = {
        r["name"]: r
        for p in (here / "results").glob("*.json")
        for r in json.loads(p.read_text())["records"]
        if "name" in r
    }
    assert not [r for r in records.values() if r["kind"] == "failure"]

    for way in ("data", "model", "hybrid"):
        step = records[f"lenet5, {way} on 2, 4 images"]
        counted = sum(row["values"] + row["ring_values"] for row in step["layers"])
        assert counted == hybrid("sending").expected(step["layers"], 4, step["channel"], step["data"])
        # Two counters: the transport's own by layer, and the backend's calls.
        assert step["sent_messages"] == sum(row["messages"] for row in step["layers"]) + step["unowned_messages"]
        assert step["sent_values"] == sum(row["values"] for row in step["layers"]) + step["unowned_values"]
    few, many = (records[f"lenet5, the document's scheme on 2, {images} images"] for images in (34, 35))
    assert few["model"]["values"] < few["data"]["values"] == many["data"]["values"] < many["model"]["values"]

    losses = [r["losses"] for name, r in records.items() if r["kind"] == "training" and r["batch"] == 10]
    assert len(losses) == 6  # with one that was nudged, and one in float64
    assert all(found == pytest.approx(losses[0], rel=1e-4) for found in losses)
    for record in (way for r in records.values() if r["kind"] == "updating" for way in r["ways"]):
        assert sum(messages for messages, _ in record["sent"]) == record["planned"]["messages"]
        for spent in record["shares"]:
            total = spent["compute"] + spent["communicating"] + spent["idle"]
            assert total == pytest.approx(spent["seconds"], rel=1e-3)
    assert all(r["difference"] < 1e-5 for r in records.values() if r["kind"] == "inference")
    profiles = {r["way"]: r for r in records.values() if r["kind"] == "profiling" and r["net"] == "lenet5"}
    assert set(profiles) == {"data", "model", "hybrid"}
    for found in profiles.values():
        assert sum(map(sum, found["parts"])) == pytest.approx(found["steps"] * sum(found["bytes"])), "none is lost"
        for spent in found["shares"]:
            total = spent["compute"] + spent["communicating"] + spent["idle"]
            assert total == pytest.approx(spent["seconds"], rel=1e-3)
    assert sum(profiles["model"]["messages"]) > sum(profiles["data"]["messages"])

    again = bench(tmp_path / "benchmarks", "--quick", "--device", "cpu", "--resume", "--output", str(here / "results"))
    assert again.count("nothing is missing") == 5
    for name in ("training-cpu", "profile-cpu"):  # as if they came from a machine with 16 cores
        shutil.copy(here / "results" / f"{name}.json", tmp_path / f"{name[:-3]}sixteen.json")
    bench(
        tmp_path / "benchmarks",
        "--collect",
        str(tmp_path / "training-sixteen.json"),
        str(tmp_path / "profile-sixteen.json"),
    )
    assert "no place for profile-cpu.json" in bench(tmp_path / "benchmarks", "--page")
    page = (here / "README.md").read_text()
    assert "61,706 ÷ 1,790 = 34.5" in page
    assert "| LeNet-5, 32² | data | 2 | 4 | 20 | 123,412 | +0.00% | 4 | 246,824 | 0.50 |" in page
    assert "| the document's | 2 | 34 | 121,720 | 123,412 | split |" in page
    assert "| model | 2 |" in page
    assert "| LeNet-5, 32², 4 images | hybrid | 2 |" in page
    for name, row in (("training-sixteen", "| batch, 2 ranks |"), ("profile-sixteen", "| LeNet-5, 32², 4 images |")):
        block = page.partition(f"<!-- {name}: ")[2].partition(f"<!-- end of {name} -->")[0]
        assert row in block, name
        assert "Not measured yet." not in block, name
    assert str(tmp_path) not in page
    assert (here / "figures" / "sizes.svg").is_file()
    assert (here / "figures" / "training.svg").is_file()
