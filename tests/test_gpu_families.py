"""What `make test-gpu` runs over NCCL holds on the CPU over gloo too, so that it is right when a GPU comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = Path(__file__).parent / "gpu" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "windowed operations", "fused halos", "GEMS", "stages × data, spatial", "domains", "offload",
        "blocks computed again", "streamed", "failures",
    ],
)  # fmt: skip
def test_family(family: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(RUN), "--ranks", "2", "--out", str(out), family]
    done = subprocess.run(
        command, env=os.environ | {"MURAL_TEST_BACKEND": "gloo"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(out.read_text())
    assert row["cases"] > 0
    assert row["wrong"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told() -> None:
    done = subprocess.run([sys.executable, str(RUN)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "needs a GPU" in done.stderr
