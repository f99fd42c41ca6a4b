"""The benchmark of schedules: its simulated part, its divisions of ranks, and its page from results."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"cpu": "a CPU", "cores": 16, "python": "3.12", "commit": "abc"}
ABOUT = {"command": "mural bench schedules", "date": "2026-11-15T00:00", "machine": MACHINE, "load_at_start": 0.5}


def bench(folder: Path, *arguments: str) -> str:
    """What the benchmark printed."""
    command = [sys.executable, str(folder / "schedules" / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def training(division: str, ranks: int, seconds: float) -> dict[str, Any]:
    about = {"model": "resnet110", "division": division, "ranks": ranks, "data": 1, "batch": 32, "losses": [2.3]}
    return about | {"seconds": [seconds] * 3, "peaks": [2**30] * ranks}


def test_gems_takes_12_units_where_one_replica_at_a_time_takes_21() -> None:
    source = importlib.util.spec_from_file_location("schedules_simulated", BENCHMARKS / "schedules" / "simulated.py")
    assert source is not None
    assert source.loader is not None
    simulated = importlib.util.module_from_spec(source)
    source.loader.exec_module(simulated)
    names = ("sequential", "GEMS lean", "GEMS interleaved")
    assert [simulated.case(name, 4, 2)["makespan"] for name in names] == [24, 21, 12]
    assert [simulated.case(name, 4, 2)["peak"] for name in names] == [1, 1, 2]
    assert simulated.case("interleaved", 4, 6)["makespan"] == 1.5 * (2 * 6 + 3)


@pytest.mark.slow
def test_the_simulated_part_and_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ignored = shutil.ignore_patterns("__pycache__", "peers", "context", "reading", "bigconv")
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=ignored)
    here = tmp_path / "benchmarks" / "schedules"
    shutil.rmtree(here / "results", ignore_errors=True)
    printed = bench(tmp_path / "benchmarks", "--parts", "simulated", "--quick", "--output", str(here / "results"))
    found = json.loads((here / "results" / "simulated.json").read_text())["records"]
    units = {(r["schedule"], r["seats"], r["microbatches"]): r["makespan"] for r in found}
    assert units["sequential", 4, 2] == 24
    assert units["GEMS lean", 4, 2] == 21
    assert units["GEMS interleaved", 4, 2] == 12
    assert "| 4 | 2 | 24 · 75% · 1 | 15 · 60% · 2 |" in printed

    settings = {"ranks": 16, "stages": 4, "microbatches": 8, "batch": 32, "rounds": 3}
    times = {"one rank": (1, 16.0), "data 16": (16, 2.0), "GEMS 4": (4, 5.0)}
    times |= {"data 4 × stage 4": (16, 1.6), "data 4 × GEMS 4": (16, 1.28)}
    records = [training(division, *given) for division, given in times.items()]
    cpu = ABOUT | {"torch": "2.11", "settings": settings, "records": records}
    (here / "results" / "cpu.json").write_text(json.dumps(cpu))
    bench(tmp_path / "benchmarks", "--page")
    page = (here / "README.md").read_text()
    assert "**21 units**\n\n```\n0.........aa1bb......\n" in page
    assert "| ResNet-110-v2, 32² | data 4 × stage 4 | 16 | 1.6 | 20 | 10.00 | 62% | 1.00 |" in page
    assert "| data 4 × stage 4 ÷ data 16 | 1.6× (HyPar-Flow, ResNet-1001) | 1.25× |" in page
    assert "| data 4 × GEMS 4 ÷ (4 · GEMS 4) | 97.32% (GEMS, 1,024 GPUs) | 97.7% |" in page
    assert "| data 4 × GEMS 4 ÷ one rank | 15× (GEMS, 7 h → 28 min) | 12.50× |" in page
    assert "GEMS interleaved: 12 units" in (here / "figures" / "gems.svg").read_text()
    assert (here / "figures" / "simulated.svg").is_file()
