"""The benchmark of all-reduces: its page from its results, and a toy run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "allreduce"


def said(script: Path, *words: str) -> str:
    """What the benchmark prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, check=False, timeout=900, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_page_of_the_all_reduces(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("allreduce", "harness"):
        shutil.copytree(ROOT / "benchmarks" / name, tmp_path / name)
    said(tmp_path / "allreduce" / "run.py", "--page")
    assert (tmp_path / "allreduce" / "README.md").read_text() == (FOLDER / "README.md").read_text()


@pytest.mark.slow
def test_a_toy_run_of_the_all_reduces(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = said(FOLDER / "run.py", "--quick", "--parts", "measured,digits,faults", "--output", str(tmp_path))
    assert "written: measured.json" in text
    records = json.loads((tmp_path / "digits.json").read_text())["records"]
    mine = {r["algorithm"]: r["accuracy"] for r in records if r["ranks"] == 2 and r["what"] == "weights"}
    assert len(mine) == 8
    assert len({tuple(accuracy) for accuracy in mine.values()}) == 1, "two ranks add up in one order, whoever does"
    assert json.loads((tmp_path / "faults.json").read_text())["records"][0]["fault"] == "order of a ring"
