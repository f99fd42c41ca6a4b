"""The benchmark of all-reduces: its page from its results, and a toy run."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.mpi_jobs import mpirun

from mural.comm import mpi

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


@pytest.mark.slow
def test_the_seconds_of_a_toy_training_by_every_algorithm(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    output = tmp_path / "toy.jsonl"
    text = said(FOLDER / "run.py", "--parts", "elapsed", "--quick", "--output", str(output))
    found = {r["name"]: r for r in map(json.loads, output.read_text().splitlines()) if r["kind"] == "elapsed"}
    assert list(found) == ["gloo/1/32", "gloo/3/32"]
    several = found["gloo/3/32"]["found"]
    assert set(several) == {"tree", "butterfly", "ring", "ring-blocking", "backend"}
    assert all(0 < each["averaging"] < each["seconds"] for each in several.values())
    assert "| gloo | 32 (14 KiB) | 3 |" in text
    assert str(tmp_path) not in output.read_text()


@pytest.mark.slow
def test_the_same_calls_over_sockets_and_over_mpi(tmp_path: Path) -> None:
    if why := mpi.available() or ("" if mpirun() else "there is no mpirun"):
        pytest.skip(why)
    output = tmp_path / "toy.jsonl"
    text = said(FOLDER / "run.py", "--parts", "sockets", "--quick", "--output", str(output))
    found = {r["name"]: r for r in map(json.loads, output.read_text().splitlines()) if r["kind"] == "calls"}
    assert list(found) == ["sockets/gloo/2", "sockets/mpi/2", "sockets/mpi-tcp/2"]
    assert set(found["sockets/gloo/2"]["found"]["1024"]) == {"backend", "tree", "butterfly", "ring"}
    assert set(found["sockets/mpi-tcp/2"]["found"]["65536"]) == {"backend", "tree", "butterfly", "ring", "MPI itself"}
    assert "| 2 | 64 KiB |" in text
    assert "--mca btl tcp,self" in output.read_text(), "the command says what MPI was made to use"
    assert str(tmp_path) not in output.read_text()


def test_the_table_of_sockets_and_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    page = importlib.import_module("sockets_page")
    times = {"gloo": {"backend": [3e-4], "ring": [4e-4]}, "mpi": {"backend": [1e-4], "MPI itself": [1e-5]}}
    records = [
        {"kind": "calls", "name": f"sockets/{key}/2", "transport": key, "ranks": 2, "software": key,
         "found": {"1024": found}} for key, found in times.items()
    ]  # fmt: skip
    text = page.text_of(records)
    assert (
        "| 2 | 1 KiB | 300 µs · 100 µs (3.00) · – | 10 µs (30.00) · – | – · – · – | – · – · – | 400 µs · – · – |"
        in text
    )


def elapsed(ranks: int, seconds: float) -> dict[str, object]:
    times = {"tree": 2 * seconds, "butterfly": seconds, "ring": seconds, "ring-blocking": seconds, "backend": seconds}
    found = {name: {"seconds": took, "averaging": took / 2, "accuracy": 0.9} for name, took in times.items()}
    about = {"kind": "elapsed", "name": f"gloo/{ranks}/32", "transport": "gloo", "ranks": ranks, "width": 32}
    return about | {"epochs": 20, "bytes": 13864, "found": found}


def test_too_many_processes_are_compared_with_as_many_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    page = importlib.import_module("elapsed_page")
    machine = {"cpu": "a CPU", "cores": 16, "python": "3.12", "commit": "abc", "allocator": "default"}
    header = {"kind": "header", "command": "mural bench allreduce", "date": "2026-11-18", "machine": machine}
    text = page.text_of([header, elapsed(16, 1.0), elapsed(8, 1.0), elapsed(80, 4.0)])
    assert "| gloo | 32 (14 KiB) | 16 | – | 2.00 (1.00) | **1.00 (0.50)** |" in text
    assert "| gloo | 32 | 80 ÷ 16 | 4.0 | 4.0 | 4.0 | 4.0 | 4.0 |" in text
