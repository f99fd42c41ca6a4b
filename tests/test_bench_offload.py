"""The benchmark of offload: its names, the published numbers, its variants in one process, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from offload import activations, copies, hosted, page
from offload.images import Draws, faces
from offload.nets import built, check_parameters
from offload.parts import MODELS, TOY, VARIANTS, Part, Sizes, all_parts, selected
from offload.published import PARAMETERS, PRINTED, STEPS, TABLES, added
from offload.rank import Offloads
from offload.settings import Settings
from offload.training import measured
from offload.variants import VARIANTS as BUILDERS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")
GIB = 2**30
SETTINGS = Settings(toy=True, epochs=2, repeats=1)
OURS = ("plan", "mural_plan")
"""Their dropout draws other numbers than plain torch's."""


@pytest.mark.parametrize("sizes", [Sizes(), TOY])
def test_names_lead_back_to_their_parts(sizes: Sizes) -> None:
    parts = all_parts(sizes)
    assert [Part.parse(part.name) for part in parts] == parts
    assert len({part.name for part in parts}) == len(parts)
    assert [part.name for part in selected(parts, ["table/*/naive", "activations/96/mural4"])][-1].endswith("/mural4")
    for wrong in ("table/vgg16/naive", "hosted/adam", "activations/2048/mural", "shape/0", "tables"):
        with pytest.raises(ValueError, match="is not the name of a part"):
            selected(parts, [wrong])


def test_caps_and_times() -> None:
    caps = {name: Part.parse(name).cap for name in ("hosted/plain", "hosted/uncapped", "activations/3072/mural8")}
    assert caps == {"hosted/plain": 16, "hosted/uncapped": None, "activations/3072/mural8": 8}
    naive = Part.parse("table/vgg19/naive")
    assert naive.expected(5) < naive.expected() < 300
    assert set(BUILDERS) == set(VARIANTS) == set(page.NAMES)


def test_published_tables_are_whole() -> None:
    assert {model for model, _ in TABLES} == set(PARAMETERS) == set(MODELS)
    for rows in TABLES.values():
        assert tuple(rows) == PRINTED
        for name, row in rows.items():
            assert (row.to_device is None) == (row.to_host is None) == (name == "baseline")
            for times in (row.to_device, row.to_host):
                assert times is None or times[2] <= min(times[0], times[3]) <= max(times[0], times[3]) <= times[1]
    assert sum(row.seconds for rows in TABLES.values() for row in rows.values()) == pytest.approx(2696.3153)
    assert added("vgg19", "V100") == pytest.approx((0.777, 0.2826), abs=1e-3)
    assert "| ResNet-50 | V100 | 0.56 | 0.07 | 0.49 | 0.09 |" in page.published()


def test_models_are_the_documents() -> None:
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        check_parameters("alexnet", torchvision.models.alexnet(num_classes=2))
        with pytest.raises(ValueError, match="where the document has 57,012,034"):
            check_parameters("alexnet", torchvision.models.alexnet(num_classes=3))


def test_images_are_divided_by_class_and_drawn_again_alike() -> None:
    pytest.importorskip("skimage")
    found = faces(32)
    assert found.images.shape == (160, 3, 32, 32)
    assert found.labels.bincount().tolist() == [80, 80]
    assert found.held_out_labels.bincount().tolist() == [20, 20]
    drawn, again = Draws(found, 32, 8), Draws(found, 32, 8)
    assert drawn[7][0].shape == (32, 3, 32, 32)
    assert torch.equal(drawn.places, again.places)
    assert torch.equal(drawn[7][0], again[7][0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_train_alike(variant: str) -> None:
    """AlexNet at toy size, with its dropout: weights are equal to the bit after training."""
    pytest.importorskip("skimage")
    base = measured(Part("table", "alexnet", page.base_of(variant)), CPU, SETTINGS)
    found = measured(Part("table", "alexnet", variant), CPU, SETTINGS)
    assert found["weights"] == base["weights"]
    assert found["losses"] == base["losses"]
    assert found["steps"] == SETTINGS.epochs * SETTINGS.epoch - SETTINGS.dropped
    assert (found["left"] is None) == (variant in ("baseline", "mural", "mural_tight", *OURS))
    assert (found["report"]["to_host"] > 0) == (variant not in ("baseline", "plan"))


def test_inception_trains_with_both_losses() -> None:
    output = built("inception_v3", CPU, toy=True)(torch.randn(2, 3, 299, 299))
    assert [scores.shape for scores in output] == [(2, 2), (2, 2)]


def test_copies_come_back_unchanged() -> None:
    found = copies.measured(Part.parse("shape/16"), CPU, SETTINGS)
    assert found["each"] == 2**16
    assert all(len(found[way]["out"]) == len(found[way]["back"]) == 1 for way in page.COPY_WAYS)


def test_adam_on_the_host_gives_the_same_losses() -> None:
    rank = Offloads()
    whole, ours = (hosted.measured(Part.parse(f"hosted/{way}"), rank, SETTINGS) for way in ("uncapped", "mural"))
    assert ours["losses"] == whole["losses"]
    assert len(set(whole["losses"])) == hosted.DROPPED + 1
    assert ours["resting"] == 2 * 4 * whole["parameters"]


@pytest.mark.parametrize("way", ["mural8", pytest.param("save_on_cpu", marks=pytest.mark.slow)])
def test_activations_leave(way: str) -> None:
    rank = Offloads()
    plain, found = (activations.measured(Part.parse(f"activations/48/{one}"), rank, SETTINGS) for one in ("plain", way))
    assert found["losses"] == plain["losses"]
    assert found["report"]["to_host"] > 0


def test_a_part_says_what_it_took() -> None:
    found = Offloads().run_part("shape/4", toy=True, repeats=1)
    assert json.loads(json.dumps(found)) == found


def trained(variant: str, total: float, **more: Any) -> dict[str, Any]:
    record = {"kind": "measure", "name": f"table/resnet50/{variant}", "total": total, "step": total / STEPS}
    record |= {"steps": STEPS, "loading": 1.0, "accuracy": 0.9, "losses": [0.5], "weights": "a", "rests_pinned": False}
    record |= {"allocated": 3 * GIB, "reserved": 4 * GIB, "between": GIB, "parameters": 23_512_130, "tensors": 161}
    return record | {"came": None, "left": None, "report": {"to_host": 0, "from_host": 0}} | more


def test_tables_from_records() -> None:
    steps = {"allocated": 10 * GIB, "reserved": 12 * GIB, "host": GIB, "losses": [1.0, 0.5]}
    moved = {"to_host": 2 * GIB, "from_host": 2 * GIB}
    text = page.tables([
        trained("baseline", 15.5),
        trained("naive", 31.0, came=[0.02] * 4, left=[0.05] * 4, report=moved, weights="b", losses=[0.75]),
        {"kind": "failure", "name": "table/resnet50/mural", "why": "error", "message": "PlanError: no"},
        {"kind": "measure", "name": "shape/8", "bytes": 8e9, "each": 1024, **{
            way: {"out": [1.0], "back": [2.0]} for way in page.COPY_WAYS
        }},
        {"kind": "measure", "name": "hosted/uncapped", **steps, "steps": [0.1], "updates": [0.1], "resting": 0},
        {"kind": "measure", "name": "hosted/mural", **steps, "steps": [0.1], "updates": [0.5], "resting": 12 * GIB},
        {"kind": "failure", "name": "hosted/plain", "why": "memory", "message": "OutOfMemoryError"},
        {"kind": "measure", "name": "activations/2048/plain", **steps, "seconds": [0.1], "report": {}},
        {"kind": "measure", "name": "activations/2048/mural8", **steps, "seconds": [0.3], "report": {
            "peak": 7 * GIB, "seconds": 0.25, **moved
        }},
    ])  # fmt: skip
    assert "| naive | 113.58 | 4.34 | 0.9608 | 31.00 | 2.00 | 200.0 | 2.00 | 0.900 | 0.750000 | no, losses: no" in text
    assert "| naive | V100 | 0.0250 | 0.0539 | 0.0216 | 0.0238 | 0.0461 | 0.0714 | 0.0292 | 0.0423 |" in text
    assert "| naive | ours | 0.0200 |" in text
    assert "| ResNet-50 | naive | 0.088 | 161 | 2.000 | 2.000 | 3.00 | 1.00 | 4.00 | 1.00 | – | 1.00 |" in text
    assert "- table/resnet50/mural: PlanError: no" in text
    assert "| 8 | 1 | 8 / 4 | 8 / 4 | 8 / 4 | 8 / 4 |" in text
    assert "| mural | 16 | 100 | 500 | 3.00 | 10.00 | 12.00 | 12.00 | 2 | 0.500000 | yes |" in text
    assert "| plain | 16 | out of memory |" in text
    assert "| 2048² | **mural** | 8 | 300 | 3.00 | 10.00 | 12.00 | 2.00 | 2.00 | 1.0 | 7.00 | 250 | 0.0e+00 |" in text


@pytest.mark.slow
def test_a_toy_run_writes_each_part(tmp_path: Path) -> None:
    output = tmp_path / "toy.jsonl"
    parts = ("table/alexnet/naive", "hosted/mural", "shape/8")
    command = [sys.executable, str(BENCHMARKS / "offload" / "run.py"), "--toy", "--device", "cpu", "--only", *parts]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r["name"] for r in records if r["kind"] == "measure"] == list(parts)
    assert str(tmp_path) not in output.read_text()
