"""The benchmark of schedules: its simulated part, its divisions of ranks, and its page from results."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import argparse, sys
from pathlib import Path
if __name__ == "__main__":
    import problems, run
    problems.divisions = lambda ranks, stages: [problems.Division(1, 2, "none"), problems.Division(1, 2)]
    numbers = {name: quick for name, (_, quick, _) in run.NUMBERS.items()}
    options = argparse.Namespace(models=["unet"], known=[], only=[], batch=0, minutes=2, quick=True, **numbers)
    run.measure(options, Path(sys.argv[1]))
"""
MACHINE = {"cpu": "a CPU", "cores": 16, "python": "3.12", "commit": "abc"}
HEADER = {"kind": "header", "command": "mural bench schedules", "date": "2026-11-15T00:00", "machine": MACHINE}


def bench(folder: Path, *arguments: str) -> str:
    """What the benchmark printed."""
    command = [sys.executable, str(folder / "schedules" / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def training(division: str, ranks: int, seconds: float, batch: int = 32) -> dict[str, Any]:
    about = {"model": "resnet110", "division": division, "ranks": ranks, "data": 1, "batch": batch, "losses": [2.3]}
    about |= {"kind": "step", "name": f"resnet110, {division}, {batch} images"}
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
def test_a_division_that_fails_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    program, found = tmp_path / "program.py", tmp_path / "cpu.jsonl"
    program.write_text(PROGRAM)
    paths = [str(BENCHMARKS / "schedules"), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, str(program), str(found)], timeout=120, check=True, env=environment)
    failed, done = (r for r in map(json.loads, found.read_text().splitlines()) if r["kind"] == "step")
    assert "schedule = 'none'" in failed["error"]
    assert failed["division"] == done["division"] == "stage 2, 2 micro-batches"
    assert done["seconds"][0] > 0
    assert done["messages"][0] > 0
    assert {row[1] for row in done["spans"]} == {"forward", "backward"} == {row[1] for row in done["predicted_spans"]}


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

    times = {"one rank": (1, 16.0), "data 16": (16, 2.0), "GEMS 4": (4, 5.0)}
    times |= {"data 4 × stage 4": (16, 1.6), "data 4 × GEMS 4": (16, 1.28)}
    records = [training(division, *given) for division, given in times.items()]
    records += [training("one rank", 1, 4.0, 8), training("data 16", 16, 5.0, 128)]
    seats = [[seat, "forward", seat, 0, 0, 0.1 * seat, 0.1 * seat + 0.1] for seat in range(4)]
    stages = training("stage 4", 4, 5.5) | {"spans": seats, "predicted_spans": seats, "messages": [24], "waited": [0.5]}
    failed = {"kind": "step", "name": "unet, stage 4, 32 images", "model": "unet", "division": "stage 4", "ranks": 4}
    failed |= {"data": 1, "batch": 32, "error": "rank 2: no room"}
    lines = [HEADER, {"kind": "versions", "torch": "2.11"}, *records, stages, failed]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, lines)))
    bench(tmp_path / "benchmarks", "--collect", str(tmp_path / "one.jsonl"))
    bench(tmp_path / "benchmarks", "--page")
    page = (here / "README.md").read_text()
    assert "**21 units**\n\n```\n0.........aa1bb......\n" in page
    assert "| ResNet-110-v2, 32² | data 4 × stage 4 | 16 | 32 | 1.6 | 20 | 10.00 | 62% | 1.00 | – | – |" in page
    assert "| ResNet-110-v2, 32² | stage 4 | 4 | 32 | 5.5 | 5.82 | 2.91 | 73% | 1.00 | 24 | 0.50 |" in page
    assert "| data 4 × stage 4 ÷ data 16 | 1.6× (HyPar-Flow) | – | 1.25× |" in page
    assert "| data 4 × GEMS 4 ÷ (4 · GEMS 4) | 97.32% (GEMS) | – | 97.7% |" in page
    assert "| data 4 × GEMS 4 ÷ one rank | 15× (GEMS, 7 h → 28 min) | – | 12.50× |" in page
    assert "| ResNet-110-v2, 32² | data 16 | 16 | 128 | 5 | 25.6 | 12.80 | 80% |" in page
    assert "stage 4, 32 images: rank 2: no room" in page
    assert "forward of stage 3" in (here / "figures" / "resnet110-stage-4.svg").read_text()
    assert "GEMS interleaved: 12 units" in (here / "figures" / "gems.svg").read_text()
    assert (here / "figures" / "simulated.svg").is_file()


# -- splits ------------------------------------------------------------------------------------------------------------


def cuts(by: str, names: list[str], memory: int) -> dict[str, Any]:
    shares = {"fitted": 0.3, "measured": 0.3}
    return {"kind": "cuts", "name": f"resnet50/4/layer/{by}", "names": names, "shares": shares, "memory": memory}


def split(by: str, names: list[str], seconds: float, grown: int) -> dict[str, Any]:
    cell = f"resnet50/4/layer/{by}"
    about = {"kind": "split", "name": cell, "cells": [cell], "model": "resnet50", "stages": 4, "names": names}
    return about | {"seconds": [seconds], "fitted": 0.9 * seconds, "by_layers": seconds, "grown": [0, grown]}


@pytest.fixture
def splits_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module; other benchmarks have modules of some of the names that it imports."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "schedules"))
    names = ("problems", "splits", "splits_page")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module("splits_page")
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_cells_of_equal_cuts_share_a_measurement_and_are_compared_with_cuts_by_layers(splits_page: Any) -> None:
    naive, even, lean = ["layer2"], ["layer3"], ["layer4"]
    records = [HEADER, {"kind": "versions", "torch": "2.11", "device": "CPU"}]
    records += [cuts("layers", naive, 2**28), cuts("time", even, 2**28), cuts("measured", even, 2**28)]
    records += [cuts("memory", lean, 2**27), split("layers", naive, 1.0, 2**28), split("time", even, 0.8, 2**28)]
    records += [split("memory", lean, 1.5, 2**27)]
    records += [{"kind": "cuts", "name": "unet/8/module/time", "impossible": "8 stages need 7 cuts"}]
    text = splits_page.text_of(records)
    assert "fitted time: step ÷ that of cuts by layers 0.80 in the geometric mean of 1 cases" in text
    row = "| 1000 (900 · 1000) | 800 (720 · 800) | 800 (720 · 800) | 1500 (1350 · 1500) | 0.80 · 0.80 | 0.80 · 0.80 |"
    assert f"| ResNet-50, 160² | 4 | layer {row}" in text
    assert "| ResNet-50, 160² | 4 | layer | 256 (256) | 256 (256) | 256 (256) | 128 (128) | 0.50 |" in text
    assert "| U-Net of width 16, 224² | 8 | module | – | too few cuts | – | – | – | – |" in text


def test_a_cell_keeps_the_cuts_that_ran_until_others_have(splits_page: Any) -> None:
    """Layers that were measured again cut it elsewhere; without that, its step was lost."""
    naive, even, other = ["layer2"], ["layer3"], ["layer3.1"]
    records = [HEADER, {"kind": "versions", "torch": "2.11", "device": "CPU"}]
    records += [cuts("layers", naive, 2**28), split("layers", naive, 1.0, 2**28), split("measured", even, 0.8, 2**28)]
    records += [cuts("measured", other, 2**29)]
    text = splits_page.text_of(records)
    assert "| 1000 (900 · 1000) | – | 800 (720 · 800) | – | – | 0.80 · 0.80 |" in text
    assert "| ResNet-50, 160² | 4 | layer | 256 (256) | – | 256 | – | – |" in text
    text = splits_page.text_of([*records, split("measured", other, 0.7, 2**29)])
    assert "| 1000 (900 · 1000) | – | 700 (630 · 700) | – | – | 0.70 · 0.70 |" in text
    assert "| ResNet-50, 160² | 4 | layer | 256 (256) | – | 512 (512) | – | – |" in text


@pytest.mark.slow
def test_a_toy_is_cut_and_run_as_each_objective_says(tmp_path: Path) -> None:
    output = tmp_path / "splits.jsonl"
    arguments = ("--parts", "splits", "--quick", "--only", "unet/2/block/*")
    listed = bench(BENCHMARKS, *arguments, "--list")
    assert "unet/2/block/measured" in listed
    bench(BENCHMARKS, *arguments, "--output", str(output))
    records = [json.loads(line) for line in output.read_text().splitlines()]
    cut = {r["name"]: tuple(r["names"]) for r in records if r["kind"] == "cuts"}
    assert len(cut) == 12, "every level is cut, as layers are measured once"
    asked = {name: names for name, names in cut.items() if "block" in name}
    assert set(asked) == {f"unet/2/block/{by}" for by in ("layers", "time", "measured", "memory")}
    run = [r for r in records if r["kind"] == "split"]
    assert {tuple(r["names"]) for r in run} == set(asked.values())
    assert len(run) == len(set(asked.values()))
    assert len({r["losses"][0] for r in run}) == 1, "where a model is cut does not change what it computes"
    assert all(r["fitted"] > 0 < r["by_layers"] for r in run)
    again = bench(BENCHMARKS, *arguments, "--output", str(output))
    assert " s a step" not in again, "what the file has is not measured again"
