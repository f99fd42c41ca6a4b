"""The page on data parallelism runs as it is written, and its benchmark runs at toy size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "data-parallelism.md"
BENCHMARK = ROOT / "benchmarks" / "data_parallel"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str) -> None:
    exec(compile(code, PAGE.name, "exec"), {})


def test_links_lead_somewhere() -> None:
    for page in (PAGE, BENCHMARK / "README.md"):
        targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
        assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.slow
def test_the_benchmark_at_toy_size(tmp_path: Path) -> None:
    output = tmp_path / "toy.json"
    command = [sys.executable, str(BENCHMARK / "run.py"), "--quick", "--device", "cpu", "--output", str(output)]
    done = subprocess.run([*command, "--models", "unet"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text())
    (pairs,) = results["pairs"]["unet"]
    assert set(pairs["seconds"]) == {"ddp", "ddp views", "ddp loss", "mural", "mural own loss", "mural exact"}
    assert set(pairs["queued"]) == set(pairs["seconds"])
    assert pairs["differences"]["mural"] < 1e-4
    assert str(tmp_path) not in output.read_text()
    for ranks in results["shares"].values():
        for spent in ranks:
            total = spent["compute"] + spent["communication"] + spent["idle"]
            assert total == pytest.approx(spent["step"], rel=1e-3)
    assert set(results["scaling"]) == {"1", "2"}
    assert "goal ≤ 1.03" in done.stdout


@pytest.mark.slow
def test_servers_norms_and_processes_at_toy_size(tmp_path: Path) -> None:
    output = tmp_path / "toy.jsonl"
    command = [sys.executable, str(BENCHMARK / "run.py"), "--quick", "--parts", "servers,norms,processes"]
    command += ["--only", "*/2", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {r["name"]: r for r in map(json.loads, output.read_text().splitlines()) if "name" in r}
    assert list(found) == ["servers/vgg16/2", "norms/unet/2", "processes/2"]
    assert set(found["servers/vgg16/2"]["seconds"]) == {"apart", "parameter-server", "tree", "ring", "backend"}
    norms = found["norms/unet/2"]
    sums = norms["exchanges"]["batch norm, whole batch"] - norms["exchanges"]["batch norm, rank"]
    assert sums == 2 * norms["norms"], "each norm adds up statistics forward and backward"
    assert norms["exchanges"]["weight norm"] == norms["exchanges"]["none"]
    assert "Training efficiency" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "servers/vgg16/2: apart" not in again.stdout, "what the file has is not measured again"


@pytest.mark.slow
def test_sharing_at_toy_size(tmp_path: Path) -> None:
    output = tmp_path / "toy.jsonl"
    command = [sys.executable, str(BENCHMARK / "run.py"), "--quick", "--parts", "sharing", "--device", "cpu"]
    command += ["--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {r["name"]: r for r in map(json.loads, output.read_text().splitlines()) if "name" in r}
    assert list(found) == ["sharing/unet/1", "sharing/unet/2"]
    assert [part["images"] for part in found["sharing/unet/1"]["parts"].values()] == [2, 1]
    ranks = found["sharing/unet/2"]
    assert ranks["images"] == 1
    assert ranks["sums"] == 1, "all gradients fit into one bucket"
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| unet, 2 |")]
    step, _, *parts = (float(cell) for cell in row.strip("| ").split(" | ")[1:])
    assert sum(parts) == pytest.approx(step, abs=0.4), "what adds to a step adds up to it"
