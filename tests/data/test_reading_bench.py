"""The benchmark of reading: it runs at toy size, checks its pixels, and writes its page from its results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FORMATS = ("TIFF, tiles, deflate", "TIFF, strips, none", "OME-Zarr, shards", "NumPy", "PNG")


def bench(folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(folder / "reading" / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_reading_runs_at_toy_size_and_writes_its_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "benchmarks"
    for name in ("harness", "reading"):
        shutil.copytree(BENCHMARKS / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    output = tmp_path / "windows.json"
    bench(folder, "--quick", "--formats", *FORMATS, "--output", str(output))
    results = json.loads(output.read_text())
    assert tuple(results["formats"]) == FORMATS
    assert str(tmp_path) not in output.read_text()
    found = results["formats"]
    assert found["NumPy"]["decoded"] == found["TIFF, strips, none"]["decoded"] == results["box_bytes"]
    assert found["PNG"]["decoded"] == results["image_bytes"]
    assert results["box_bytes"] < found["TIFF, tiles, deflate"]["decoded"] == found["OME-Zarr, shards"]["decoded"]
    assert set(found["TIFF, tiles, deflate"]["seconds"]) >= {"mural", "tifffile", "rasterio", "openslide"}
    bench(folder, "--page", "--output", str(output))
    page = (folder / "reading" / "README.md").read_text()
    assert all(f"| {name} |" in page for name in FORMATS)
    assert "milliseconds" in (folder / "reading" / "figures" / "windows.svg").read_text()
