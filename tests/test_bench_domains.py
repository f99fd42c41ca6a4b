"""The benchmarks of domains run at toy sizes, and write their pages from results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def ran(folder: Path, *arguments: str) -> str:
    """What a benchmark's script printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(folder / "run.py"), *arguments],
        capture_output=True, text=True, timeout=280, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    """A copy of the folder that pages can be written into."""
    for name in ("adaptation", "multi_dsn", "harness"):
        shutil.copytree(ROOT / "benchmarks" / name, tmp_path / "benchmarks" / name)
    return tmp_path / "benchmarks"


@pytest.mark.slow
def test_adaptation_in_small(benchmarks: Path) -> None:
    folder = benchmarks / "adaptation"
    ran(folder, "--quick", "--output", str(folder / "results" / "cpu.json"))
    assert len(json.loads((folder / "results" / "cpu.json").read_text())["targets"]) == 4
    ran(folder, "--page")
    assert "| **mean** |" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_multi_dsn_in_small(benchmarks: Path, tmp_path: Path) -> None:
    folder, results = benchmarks / "multi_dsn", tmp_path / "results.jsonl"
    ran(folder, "--quick", "--device", "cpu", "--targets", "1", "--output", str(results))
    records = [json.loads(line) for line in results.read_text().splitlines()]
    losses = {(r["way"], r["side"]): r["loss"] for r in records if r["kind"] == "measure"}
    assert len(losses) == 8
    for side in (16, 32):
        found = [loss for (_, at), loss in losses.items() if at == side]
        assert found == pytest.approx([found[0]] * 4, rel=1e-5)
    ran(folder, "--collect", str(results))
    ran(folder, "--page")
    assert "| 1 + 1, by part |" in (folder / "README.md").read_text()
