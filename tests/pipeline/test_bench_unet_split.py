"""The benchmark of cut U-Nets: predicted memory of stages, the cuts of its ways, and its page from results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import json
import memory, ways, published
from nets import NETS
net = NETS["toy"]
graph = net.graph()
cap = 2**23
found = {way.name: ways.forecast(net, way, graph, cap) for way in ways.ways(net, 4)}
one = memory.needs(graph, [0])[0]
starts = [0, *ways.memory.best(graph, [1] * 4, 1.0)[0]]
print(json.dumps({
    "largest": {name: forecast.largest(cap) for name, forecast in found.items()},
    "one": [one.fixed, one.pixels],
    "best": max(need.at(1.0) for need in memory.needs(graph, starts)),
    "seats": found["horizontal"].plan.seats,
    "figures": [len(ways.by_blocks(f)(NETS["classic"].graph(), 1.0)) for f in (published.FIGURE_7, published.FIGURE_8)],
    "naive": found["naive"].peak(net.side),
    "goals": ways.goals(net, graph, 4, cap),
}))
"""


def python(folder: Path, *arguments: str, limit: float = 240) -> str:
    """What a Python program printed."""
    paths = [str(folder / "unet_split"), str(folder), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=limit, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_predictions_of_a_toy() -> None:
    found = json.loads(python(BENCHMARKS, "-c", PROGRAM))
    largest = found["largest"]
    assert largest["sequential"] < largest["naive"] <= largest["memory"] <= largest["optimum"]
    assert largest["spatial"] < largest["spatial, recompute"]
    assert largest["optimum"] == pytest.approx(found["goals"]["optimum"], abs=1)
    assert found["goals"]["gain"] <= found["goals"]["bound"]
    assert found["best"] <= found["naive"] < sum(found["one"])
    assert found["seats"] == [0, 1, 2, 1, 0]
    assert found["figures"] == [7, 7]


def measured(way: str, side: int, seconds: float, allocated: float, **more: Any) -> dict[str, Any]:
    about = {"kind": "measure", "net": "classic", "way": way, "side": side, "cap": 2**34, "predicted": 2**33}
    return about | {"allocated": allocated, "each": [allocated] * 8, "seconds": [seconds] * 3, **more}


@pytest.mark.slow
def test_the_page_from_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ignored = shutil.ignore_patterns("__pycache__", "peers", "context", "reading", "bigconv", "schedules")
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=ignored)
    here = tmp_path / "benchmarks" / "unet_split"
    machine = {"cpu": "a CPU", "cores": 16, "python": "3.12", "commit": "abc", "allocator": "default"}
    records = [
        {"kind": "header", "command": "mural bench unet_split", "date": "2026-11-15", "machine": machine},
        measured("sequential", 512, 0.5, 2**32),
        measured("naive", 512, 0.75, 2**31),
        measured("memory", 512, 1.0, 2**30),
        {"kind": "failure", "net": "classic", "way": "sequential", "side": 640, "cap": 2**34, "why": "memory"},
        {"kind": "agrees", "name": "2 stages, gpipe", "loss": 1e-16, "gradients": 2e-16, "state": 0.0},
    ]
    (here / "results" / "gpu.json").write_text(json.dumps({"records": records}))
    python(tmp_path / "benchmarks", str(here / "run.py"), "--page")
    page = (here / "README.md").read_text()
    assert (
        "| 512² | 1.3 | 1.44 | 1.48 | 0.500 · 4.00 | 0.750 · 2.00 | 1.000 · 1.00 | 1.11 · 1.50 | 1.14 · 2.00 |" in page
    )
    assert "| 640² | OOM | 1.9 | 1.92 | OOM | – | – |" in page
    assert "| 2 stages, gpipe | 1e-16 | 2e-16 | 0e+00 |" in page
    assert (here / "figures" / "ranks.svg").is_file()


@pytest.mark.slow
def test_a_toy_is_cut_over_ranks_until_it_fails(tmp_path: Path) -> None:
    output = tmp_path / "toy.jsonl"
    arguments = ["--quick", "--device", "cpu", "--parts", "predicted,measured", "--ways", "sequential;horizontal;naive"]
    arguments += ["--only", "toy/*al"]
    printed = python(BENCHMARKS, str(BENCHMARKS / "unet_split" / "run.py"), *arguments, "--output", str(output))
    records = [json.loads(line) for line in output.read_text().splitlines()]
    limits = {r["way"]: r["largest"] for r in records if r["kind"] == "limit"}
    assert limits["horizontal"] >= 64, printed
    assert all(r["why"] == "memory" for r in records if r["kind"] == "failure")
    assert set(limits) == {"sequential", "horizontal"}
    listed = python(
        BENCHMARKS, str(BENCHMARKS / "unet_split" / "run.py"), *arguments[:-2], "--list", "--known", str(output)
    )
    left = {line.split("  ")[-1] for line in listed.splitlines() if " s  toy/" in line}
    assert "toy/naive" in left
    assert len(left) < 3, "a way whose largest side is known is not listed"
