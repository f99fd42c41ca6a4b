"""The benchmark of whole images: its parts, its images, its sliding window, its tables, and a run at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from whole_image import page
from whole_image.parts import QUICK, Part, Sizes, all_parts
from whole_image.textures import CLASSES, source, write_file
from whole_image.windows import sliding_labels

import mural

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_a_part_is_known_by_its_name() -> None:
    for part in all_parts(Sizes(), "cuda") + all_parts(QUICK, "cpu"):
        assert Part.parse(part.name) == part
    for name in ("predict/64/tf32/stream", "same/64/tf32/4", "predict/0/tf32/4", "other/64/tf32/4"):
        with pytest.raises(ValueError, match="not the name of a part"):
            Part.parse(name)


def test_a_file_holds_the_image_that_is_made(tmp_path: Path) -> None:
    for mask in (False, True):
        found = mural.open(write_file(tmp_path, 100, mask)).read()
        assert torch.equal(found, source(100, mask).read())
    assert sorted(found.unique().tolist()) == list(range(CLASSES))


def test_windows_of_a_network_that_looks_at_a_pixel_alone_give_its_labels() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 1)
    image = torch.randint(0, 256, (3, 50, 70), dtype=torch.uint8)
    expected = model(image[None].float() / 255).argmax(1)[0].to(torch.uint8)
    for overlap in (0.0, 0.25, 0.5):
        assert torch.equal(sliding_labels(model, image, 32, overlap), expected)


def test_tables_from_records() -> None:
    peaks = {"allocated": 2**30, "reserved": 2**31, "host_grown": 2**29}
    text = page.tables([
        {"kind": "measure", "name": "predict/10000/tf32/4", "seconds": 2.0, "tile": 768, "right": 0.9, **peaks},
        {"kind": "measure", "name": "cpu/1000/float32/ranks4", "seconds": 2.0, "whole_seconds": 5.0, "differ": 0},
        {"kind": "measure", "name": "sliding/1000/tf32/0.5", "seconds": 0.1, "whole_seconds": 0.05, "differ": 20000,
         "window": 512, "right": 0.8, "whole_right": 0.85, "reserved": 2**30},
    ])  # fmt: skip
    assert "| 10000² | tf32 | 4 GiB | 768 | 2.0 | 20 | 1.00 | 2.00 | 0.50 | 90.00% |" in text
    assert "| 1000² | CPU | float32 | 4 ranks | 0 | 2.0 | 5.0 |" in text
    assert "| 1000² | tf32 | – | – | – | 85.00% | 50 | – |" in text
    assert "| 1000² | tf32 | 512² | 50% | 20,000 (2%) | 80.00% | 100 | 1.00 |" in text


@pytest.mark.slow
def test_a_toy_run_gives_the_same_labels_under_every_plan(tmp_path: Path) -> None:
    output = tmp_path / "toy.jsonl"
    command = [sys.executable, str(BENCHMARKS / "whole_image" / "run.py"), "--quick", "--device", "cpu"]
    command += ["--output", str(output), "--folder", str(tmp_path / "files")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = [r for line in output.read_text().splitlines() if (r := json.loads(line))["kind"] == "measure"]
    assert [r["name"] for r in measured] == [part.name for part in all_parts(QUICK, "cpu")]
    assert all(r["differ"] == 0 for r in measured if r["name"].startswith("cpu/"))
    assert str(tmp_path) not in output.read_text()
