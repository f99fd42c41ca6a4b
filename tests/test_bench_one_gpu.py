"""The benchmark of one device: its sources, its ways in one process, a toy run, and its tables from records."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_gpu import ways
from one_gpu.nets import NETS, Data, built, made_data
from one_gpu.page import table
from one_gpu.parts import TOY, Part, Sizes, all_parts, selected
from one_gpu.rank import Alone, gradient_norm
from one_gpu.sources import made_image, made_mask, opened_files, write_files

import mural

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize("sizes", [Sizes(), TOY])
def test_names_lead_back_to_their_parts(sizes: Sizes) -> None:
    parts = all_parts(sizes)
    assert [Part.parse(part.name) for part in parts] == parts
    assert len({part.name for part in parts}) == len(parts)
    variant = "unet/stream16/fp32/training/100@48+recompute+tuned"
    assert selected(parts, [variant])[0].name == variant
    with pytest.raises(ValueError, match="is not the name of a part"):
        selected(parts, ["unet/streamed"])


def test_tiles_divide_an_image_evenly_and_shrink_with_the_cap() -> None:
    parts = [Part.parse(f"unet/stream{cap}/bf16/frozen/65536") for cap in (16, 8, 4)]
    tiles = [part.chosen_tile for part in parts]
    assert tiles == sorted(tiles, reverse=True)
    assert all(0 <= -65536 % tile < 32 * (65536 // tile + 1) for tile in tiles)


@pytest.mark.parametrize("extents", [(1500, 2100), (140, 150, 130)])
def test_a_box_is_the_same_alone_and_within_a_larger_one(extents: tuple[int, ...]) -> None:
    image, mask = made_image(3, extents), made_mask(3, extents)
    inner = [(n - 60, n - 5) for n in extents]
    whole = image.read()
    assert torch.equal(image.read([(0, 3), *inner]), whole[(slice(None), *(slice(*span) for span in inner))])
    assert torch.equal(mask.read()[0] == 1, whole[0] > 0.5)
    assert torch.equal(made_image(3, extents, floating=True).read([(1, 2), *inner]), image.read([(1, 2), *inner]))


def test_files_hold_what_is_made(tmp_path: Path) -> None:
    write_files(tmp_path, 100)
    image, mask = opened_files(tmp_path, 100)
    assert torch.equal(image.read(), made_image(3, (100, 100)).read())
    assert torch.equal(mask.read(), made_mask(3, (100, 100)).read())


def taken(way: str, precision: str = "fp32", norm: str = "frozen", data: Data | None = None) -> tuple[float, float]:
    """Loss and gradients' norm of a step at toy size."""
    part = Part.parse(f"unet/{way}/{precision}/{norm}/52@32")
    model = built(part, CPU, toy=True)
    found = ways.WAYS[part.way](part, model, CPU)
    found.take(data or made_data(part, part.size, CPU))
    return float(found.step()), gradient_norm(model)


@pytest.mark.parametrize("norm", ["frozen", "training", "instance"])
def test_ways_in_memory_give_one_result(norm: str) -> None:
    plain = taken("plain", norm=norm)
    assert plain[1] > 0
    assert taken("checkpoint16", norm=norm) == pytest.approx(plain, rel=1e-5)
    assert taken("save_on_cpu16", norm=norm) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_streamed_step_reads_its_sources(precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The step of a plan without a tile stands for the streamed one: the same call, from sources and from files."""
    whole = mural.parallelize

    def unstreamed(model: torch.nn.Module, plan: mural.Plan, **more: Any) -> Any:
        return whole(model, replace(plan, stream=None), **more)

    monkeypatch.setattr(mural, "parallelize", unstreamed)
    plain = taken("plain", precision)
    assert taken("stream16", precision) == pytest.approx(plain, rel=1e-2 if precision == "bf16" else 1e-5)
    write_files(tmp_path, 52)
    data = Data(*opened_files(tmp_path, 52))
    assert taken("file16", precision, data=data)[0] == pytest.approx(plain[0], rel=1e-2)
    assert data.bytes_read >= 4 * 52 * 52


@pytest.mark.slow
def test_a_part_says_what_it_took() -> None:
    rank = Alone()
    found = rank.steps("unet3d/plain/fp32/instance/16", toy=True, folder="", repeats=2, budget=60.0)
    assert len(found["seconds"]) == 2
    assert len(set(found["losses"])) == 1
    assert found["host"] > 0
    assert json.loads(json.dumps(found)) == found


def test_resnet_is_whole_outside_of_toys() -> None:
    pytest.importorskip("torchvision")
    with torch.device("meta"):
        assert sum(p.numel() for p in NETS["resnet50"].build(False, "training").parameters()) == 23_512_130
        assert sum(p.numel() for p in NETS["unet"].build(False, "training").parameters()) == 31_037_698


def measured(name: str, seconds: float, gib: float, **more: Any) -> dict[str, Any]:
    sizes = {"allocated": gib * GIB, "reserved": gib * GIB, "host": 2 * GIB, "tile": 2048, "bytes_read": 268_435_456}
    return {"kind": "measure", "name": name, "seconds": [seconds], "losses": [0.7], "gradient": 2.0, **sizes, **more}


def test_tables_from_records() -> None:
    report = {"passes": 2, "tiles": 16, "predicted_seconds": 1.6, "predicted_bytes": 268_435_456, "peak": 15 * GIB}
    text = table([
        measured("unet/plain/bf16/frozen/4096", 0.33554432, 49.6),
        measured("unet/plain/bf16/frozen/8192", 1.34217728, 120.0),
        measured("unet/plain16/bf16/frozen/2048", 0.1, 12.0),
        {"kind": "failure", "name": "unet/plain16/bf16/frozen/3072", "why": "memory", "message": "OutOfMemoryError"},
        measured("unet/stream16/bf16/frozen/8192", 1.67772160, 15.0, report=report),
        measured("unet/stream8/bf16/frozen/8192", 2.01326592, 7.5),
        {"kind": "failure", "name": "unet/stream4/bf16/frozen/8192", "why": "error", "message": "PlanError: no"},
    ])  # fmt: skip
    assert "| U-Net | bf16 | frozen | 16 GiB | in memory | 2048² | 0.1 | 1.19 | 3072²: out of memory |" in text
    assert "| U-Net | bf16 | frozen | 4 GiB | **streamed** | – | – | – | 8192²: PlanError: no |" in text
    assert "| 8192² | 2048 | 1.68 | 25.0 | 1.25 (goal ≤ 1.3) | 15.00 | 15.00 | 2.0 |" in text
    assert "| U-Net | bf16 | frozen | 8192² | 25.0 | 30.0 |" in text
    assert "| 2 | 16 | 1.68 | 1.6 | 1.05 | 15.00 | 15.00 | 1.000 | 0.27 | 0.27 |" in text
    assert "| unet/stream16/bf16/frozen/8192 | 0.7 | 0.7 | 0.0e+00 | 2 | 2 | 0.0e+00 | – |" in text


@pytest.mark.slow
def test_a_toy_run_writes_each_part_and_goes_on_after_failures(tmp_path: Path) -> None:
    output = tmp_path / "toy.jsonl"
    parts = ("unet/plain/bf16/frozen/48", "resnet50/lightstream16/fp32/training/48", "unet/plain/fp32/training/48")
    command = [sys.executable, str(BENCHMARKS / "one_gpu" / "run.py"), "--toy", "--device", "cpu", "--only", *parts]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r["name"] for r in records if r["kind"] == "measure"] == [parts[0], parts[2]]
    assert "lightstream" in done.stdout
    assert "| U-Net | bf16 | frozen | – | in memory | 48² |" in done.stdout
    assert str(tmp_path) not in output.read_text()
