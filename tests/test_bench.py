"""The benchmarks' harness: the search for the largest image, replay, a toy run on ranks, and pages from results."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.case import GIB, Case
from harness.problem import Problem, noise
from harness.replay import Tape, recording, replaying
from harness.results import Log, collect, read
from harness.search import next_size
from harness.session import guess_for
from harness.tables import Found

from ranks import run_on

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CAP = 16 * GIB


def searched(fits: int, guess: float, step: int = 256, bytes_per_pixel: float = 5700.0, dims: int = 2) -> list[int]:
    """The extents that a search tries where an extent fits up to that one."""
    peaks: dict[int, float] = {}
    failed: set[int] = set()
    tried: list[int] = []
    while (size := next_size(peaks, failed, guess=guess, step=step, cap=CAP, dims=dims)) is not None:
        tried.append(size)
        if size <= fits:
            peaks[size] = 2**28 + bytes_per_pixel * size**dims
        else:
            failed.add(size)
    return tried


@pytest.mark.parametrize(("fits", "guess"), [(1536, 1280), (1536, 256), (1536, 1536), (1536, 4096), (1280, 1280)])
def test_the_search_ends_at_the_largest_that_fits_after_few_tries(fits: int, guess: float) -> None:
    tried = searched(fits, guess)
    assert max(size for size in tried if size <= fits) == fits
    assert fits + 256 in tried
    assert len(tried) == len(set(tried)) <= 6


def test_the_search_recovers_from_a_prediction_that_is_far_off() -> None:
    tried = searched(2048, 1024, bytes_per_pixel=100.0)
    assert {2048, 2304} <= set(tried)
    assert len(tried) <= 8


def test_the_search_gives_up_where_nothing_fits() -> None:
    assert searched(0, 1024) == [1024, 512, 256]


def test_a_guess_for_ranks_grows_with_their_number() -> None:
    assert [guess_for(n, 1536, 1280, 256, 2) for n in (2, 4, 8)] == [1792, 2816, 3840]


def test_a_rank_ends_with_whoever_asked_it() -> None:
    """Ranks of a benchmark that was killed went on computing, next to the measurements of the next one."""
    busy = "from harness.worker import *\nfor _ in commands(): print('busy', flush=True); time.sleep(60)"
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", busy], stdin=pipe, stdout=pipe, text=True, env=environment) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write("{}\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "busy\n"
        rank.stdin.close()
        assert rank.wait(timeout=20) == 0


def test_noise_is_the_same_whoever_makes_it() -> None:
    device = torch.device("cpu")
    whole = noise(2, ((0, 9), (0, 7)), device, torch.float32)
    assert torch.equal(noise(2, ((3, 9), (2, 5)), device, torch.float32), whole[:, :, 3:9, 2:5])
    assert whole.std() > 0.3


def test_files_of_results_become_one_and_the_later_counts(tmp_path: Path) -> None:
    case = Case("CNN2D", (8, 8))
    lines = [{"kind": "measure", "case": case.encode(), "cap": None, "allocated": n} for n in (1, 2)]
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(line) + '\n{"kind": "mea')
    assert collect([tmp_path / "0.jsonl", tmp_path / "1.jsonl"], tmp_path / "all.json") == 1
    assert read(tmp_path / "all.json") == lines[1:]
    log = Log("bigconv", tmp_path / "new.jsonl", [tmp_path / "all.json"], minutes=1)
    assert log.find("measure", case=case.encode(), cap=None) == lines[1]
    assert str(tmp_path) not in (tmp_path / "new.jsonl").read_text()


def replayed() -> tuple[list[float], float]:
    case = Case("UNet2D", (48, 40), 2, options=(("width", 2), ("depth", 2)))
    problem = Problem(case, torch.device("cpu"))
    tape = Tape()
    with recording(tape):
        losses = [float(problem.step())]
    expected = [p.grad.clone() for p in problem.model.parameters()]
    for _ in range(2 if problem.mesh.rank == 0 else 1):  # the ranks no longer wait for each other
        with replaying(tape):
            losses.append(float(problem.step()))
    grads = [p.grad for p in problem.model.parameters()]
    return losses, max(float((a - b).abs().max()) for a, b in zip(expected, grads, strict=True))


def test_a_rank_replays_its_part_of_a_step_alone() -> None:
    for losses, difference in run_on(2, replayed):
        assert len(set(losses)) == 1
        assert difference == 0


def misreplayed() -> str:
    small = Problem(Case("CNN2D", (16, 16), 2, options=(("width", 2),)), torch.device("cpu"))
    large = Problem(Case("CNN2D", (32, 32), 2, options=(("width", 2),)), torch.device("cpu"))
    tape = Tape()
    with recording(tape):
        small.step()
    try:
        with replaying(tape):
            large.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_replay_of_another_step_is_refused() -> None:
    assert all("was recorded" in text for text in run_on(2, misreplayed))


def bench(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A benchmark's script, run to its end."""
    command = [sys.executable, str(folder / name / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_bigconv_runs_at_toy_size_and_survives_want_of_memory(tmp_path: Path) -> None:
    output = tmp_path / "toy.jsonl"
    toy = ("--quick", "--device", "cpu", "--ranks", "1,2", "--models", "CNN2D")
    bench(BENCHMARKS, "bigconv", *toy, "--output", str(output))
    records = read(output)
    kinds = [record["kind"] for record in records if record["kind"] not in ("header", "versions")]
    assert kinds == ["measure", "busy", "failure"] * 2
    measures = [record for record in records if record["kind"] == "measure"]
    assert [record["case"]["ranks"] for record in measures] == [1, 2]
    assert measures[0]["loss"] == pytest.approx(measures[1]["loss"], rel=1e-5)
    assert all(record["why"] == "memory" for record in records if record["kind"] == "failure")
    assert all(len(set(record["losses"])) == 1 for record in records if record["kind"] == "busy")
    bench(BENCHMARKS, "bigconv", "--counts", *toy[:3], "--output", str(output))
    counts = [record for record in read(output) if record["kind"] == "utilisation"]
    assert [len(record["kernels"]) for record in counts] == [1, 3, 1, 1, 2, 2, 2]
    assert [record["case"].get("batch", 1) for record in counts[2:]] == [2, 4, 1, 2, 4]
    measures = [record for record in read(output) if record["kind"] == "measure" and "batch" in record["case"]]
    losses = {(record["case"]["batch"], record["case"]["ranks"]): record["loss"] for record in measures}
    for batch in (2, 4):
        assert losses[batch, 1] == pytest.approx(losses[batch, 2], rel=1e-5)


def header() -> list[dict[str, Any]]:
    machine = {"cpu": "a CPU", "cores": 2, "python": "3.12", "driver": "1", "allocator": "default", "commit": "abc"}
    device = {"device": "a GPU", "device_memory": 80 * GIB, "cudnn": 9, "convolutions_in_tf32": True}
    return [
        {"kind": "header", "command": "mural bench NAME", "date": "2026-11-15T00:00", "machine": machine},
        {"kind": "versions", "torch": "2.11", **device},
    ]


def measured(case: Case, cap: int | None, peak: float) -> dict[str, Any]:
    sizes = {"allocated": peak, "reserved": peak, "device": peak, "replicated": 2**20}
    return {"kind": "measure", "case": case.encode(), "cap": cap, **sizes, "loss": 1.0, "seconds": [0.2, 0.1, 0.3]}


def published(folder: Path, name: str, records: list[dict[str, Any]]) -> str:
    """The page that a benchmark writes from these records."""
    pytest.importorskip("matplotlib")
    shutil.copytree(BENCHMARKS, folder / "benchmarks", ignore=shutil.ignore_patterns(".venv", "__pycache__"))
    source = folder / "some.jsonl"
    source.write_text("\n".join(json.dumps(record) for record in header() + records))
    bench(folder / "benchmarks", name, "--collect", str(source))
    bench(folder / "benchmarks", name, "--page")
    return (folder / "benchmarks" / name / "README.md").read_text()


def test_the_page_of_bigconv(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    for ranks, largest in ((1, 1024), (8, 2816)):
        limit = Case("CNN2D", (0, 0), ranks)
        records.append({"kind": "limit", "case": limit.encode(), "cap": CAP, "largest": largest, "above": "memory"})
        case = limit.sized(512)
        records.append(measured(case, CAP, 4 * GIB / ranks))
        records.append({"kind": "busy", "case": case.encode(), "cap": CAP, "seconds": [0.1 / ranks] * ranks})
    text = published(tmp_path, "bigconv", records)
    assert "| **CNN2D** | 1024² | – | – | 2816² | 7.6 on 8 | 2200² on 1, 4000² on 5, 6000² on 10 |" in text
    assert "| **CNN2D** 512² | 0.00 | 4.00 / 4.00 | – | – | 0.50 (1.00) / 0.50 |" in text
    assert "200 / 12.5 (1.00)" in text
    picture = (tmp_path / "benchmarks/bigconv/figures/cnn2d.svg").read_text()
    assert "peak memory of a rank" in picture


def counted(ranks: int, largest: int, peak: float, kernels: float) -> list[dict[str, Any]]:
    """Records of CNN2D under a smaller cap."""
    cap, wall = 8 * GIB, 0.1
    at = {side: Case("CNN2D", (side, side), ranks) for side in (0, 1024, 2048)}
    return [
        {"kind": "limit", "case": at[0].encode(), "cap": cap, "largest": largest, "above": "memory"},
        measured(at[1024], cap, peak),
        measured(at[2048], cap, 2 * peak),
        {
            "kind": "utilisation", "case": at[2048].encode(), "cap": cap,
            "wall": [wall] * ranks, "kernels": [kernels * wall, *[wall * kernels / 2] * (ranks - 1)],
        },
    ]  # fmt: skip


def batched(ranks: int, images: int) -> list[dict[str, Any]]:
    """Records of CNN2D with several images at a time, cut without loss."""
    case, share = Case("CNN2D", (2048, 2048), ranks, batch=images), images / ranks
    busy = {"wall": [0.01 * share] * ranks, "kernels": [0.008 * share] * ranks}
    return [
        measured(case, CAP, 2 * GIB * share),
        {"kind": "utilisation", "case": case.encode(), "cap": CAP, **busy},
    ]


def test_the_documents_numbers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "bigconv"))
    for name in ("published", "counts", "counts_table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    counts, table = importlib.import_module("counts"), importlib.import_module("counts_table")
    names = [task.name for task in counts.tasks(quick=False)]
    assert len(names) == len(set(names)) == 25 + 18
    assert {int(name.split("/")[2]) for name in names} == {1, 4, 5, 6, 8, 9, 10, 12, 28}
    text = table.counts_text(Found(counted(1, 4096, 3 * GIB, 0.9) + counted(10, 12288, 0.5 * GIB, 0.6)))
    assert "| **CNN2D** | 8 | 10 | 4096² | 12288² | 9.0 | 7.4 |" in text
    assert "| 10 ranks | 0.50 | 6.0 | 0.50 | 6.0 |" in text
    assert "| **CNN2D** 2048² | 10 | 100 | 60 | 33% (30% to 60%) | 165% |" in text
    text = table.counts_text(Found(batched(1, 4) + batched(8, 4) + batched(8, 2)))
    assert "| **CNN2D** 2048² | 8 | 4 | 1.00 | 8.0 | 5 | 1.25 | 8.00 | 80% | 200 | 1.00 |" in text
    assert "| 8 | 2 |" not in text  # one rank has not run with this batch
    for name in ("published", "counts", "counts_table"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_page_of_the_unet(tmp_path: Path) -> None:
    size, precision = (4096, 4096), "float32"
    records = [
        measured(Case("UNet2D", size, sharded=False), None, 80 * GIB),
        measured(Case("UNet2D", size, 8), CAP, 10.5 * GIB),
        {"kind": "limit", "case": Case("UNet2D", (0, 0), 8, precision).encode(), "cap": CAP, "largest": 4096},
        {
            "kind": "pairs", "case": Case("UNet2D", (2048, 2048)).encode(), "cap": None,
            "ranks": [
                {
                    "plain": [1.0] * 3, "mural": [1.02] * 3, "computing": {"plain": 1.0, "mural": 1.01},
                    "extents": [2048, 2048],
                }
            ],
        },
    ]  # fmt: skip
    text = published(tmp_path, "peers", records)
    assert "| 8 × 4096² | float32 | 80.0 | 10.00 | 10.50 | **1.050** |" in text
    assert "**1.020** (1.020 to 1.020)" in text
    assert "two ranks, no exchange" in text
