"""The doctor: what it says, that failures are lines, that it leaves nothing behind, and that one rank prints."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from mural.doctor import Finding, Report, Section, examine, features, speed
from mural.doctor.features import FEATURES, Feature, optional
from mural.doctor.findings import found
from ranks import run_on

TITLES = ["launch", "versions", "machine", "backends and launchers", "optional features", "speeds"]
BIN = Path(sys.executable).parent


def shown(report: Report, as_json: bool = False) -> str:
    out = io.StringIO()
    report.show(Console(file=out, width=200), as_json)
    return out.getvalue()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small trials, and no local ranks."""
    monkeypatch.setattr(speed, "BUFFER", 2**24)
    monkeypatch.setattr("mural.doctor.examination.local_link", lambda: (Finding("link", "9 GB/s"),))


@pytest.mark.usefixtures("quick")
def test_report(tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert [section.title for section in report.sections] == TITLES
    assert all(section.items for section in report.sections)
    assert report.section("launch").items[0] == Finding("placement", "one process (single)")
    assert torch.__version__ in report.section("versions").items[2].text
    speeds = {item.name: item for item in report.section("speeds").items}
    assert {"memory copy", "link", "disk, write", "disk, read"} <= set(speeds)
    assert all(item.number is not None and item.number > 0 for name, item in speeds.items() if name != "link")
    assert list(tmp_path.iterdir()) == []  # the trial file is gone
    text = shown(report)
    assert all(title in text for title in TITLES)
    data = json.loads(shown(report, as_json=True))
    assert data == json.loads(json.dumps(report.data()))
    assert [section["title"] for section in data["sections"]] == TITLES


@pytest.mark.usefixtures("quick")
def test_what_fails_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("no such\nthing")

    assert found("thing", broken) == (Finding("thing", "RuntimeError: no such", "failed"),)
    monkeypatch.setenv("RANK", "1")  # without WORLD_SIZE
    report = examine(tmp_path / "nowhere")
    assert report.section("launch").items[0].state == "failed"
    assert "WORLD_SIZE is not" in report.section("launch").items[0].text
    disk = report.section("speeds").items[-1]
    assert (disk.name, disk.state) == ("disk", "failed")
    assert "No such file" in disk.text
    assert "WORLD_SIZE is not" in shown(report)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    (item,) = found("disk", lambda: speed.disk(tmp_path))
    assert item.state == "failed"
    assert "Permission denied" in item.text


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 100, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    assert speed.disk(tmp_path)[0].state == "failed"


def test_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = optional(Feature("slides", "no_such_module", "no-such-package", "slides"))
    assert missing == Finding("slides", 'missing: pip install "mural-train[slides]"', "missing")
    (tmp_path / "half_there.py").write_text("raise ImportError('libopenslide.so.1 is not there')")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = optional(Feature("slides", "half_there", "x", "slides"))
    assert broken.state == "failed"
    assert "libopenslide" in broken.text
    assert 'pip install "mural-train[slides]"' in broken.text
    assert optional(Feature("pictures", "PIL", "pillow", "x")).text.startswith("pillow ")


def test_a_torchvision_for_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was said, as mural declares the operation without which torchvision is not imported."""
    vision = next(feature for feature in FEATURES if feature.module == "torchvision")
    for there, state in ((True, "found"), (False, "failed")):
        monkeypatch.setattr("torchvision.extension._has_ops", lambda there=there: there)
        assert optional(vision).state == state


def test_each_extra_of_the_package_is_looked_at() -> None:
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for feature in features.FEATURES:
        assert f"\n{feature.extra} = [" in pyproject, feature.extra


def test_mpi_that_crashes_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MPI_PROBE", "import sys; sys.exit('libmpi.so.40: cannot open shared object file')")
    item = features.mpi()
    assert item.state == "missing"
    assert "libmpi.so.40" in item.text


def test_only_rank_0_shows() -> None:
    sections = (Section("launch", (Finding("placement", "x"),)),)
    assert shown(Report(sections, rank=1)) == ""
    assert shown(Report(sections, rank=0)) != ""


def link_of_ranks() -> list[tuple[str, float | None]]:
    speed.MESSAGE, speed.TRIPS = 2**16, 5
    try:
        from mural.doctor.examination import real_link

        return [(item.name, item.number) for item in real_link()]
    finally:
        dist.barrier()


def test_the_real_link_is_measured_between_ranks() -> None:
    first, second = run_on(2, link_of_ranks)
    assert [name for name, _ in first] == [
        "latency, to another local rank over gloo",
        "link, to another local rank over gloo",
    ]
    assert all(number is not None and number > 0 for _, number in first + second)


@pytest.mark.slow
def test_examination_of_this_machine_with_local_ranks(tmp_path: Path) -> None:
    report = examine(tmp_path)
    names = [item.name for item in report.section("speeds").items]
    assert "link, two local ranks over gloo" in names, shown(report)


@pytest.mark.slow
@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="needs mpirun, of mural-train[mpi]")
def test_under_mpirun_it_prints_once(tmp_path: Path) -> None:
    imports = "from rich.console import Console; from mural.doctor import examine"
    code = f"{imports}; examine({str(tmp_path)!r}).show(Console(), True)"
    command = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-c", code]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # one report, not two
    launch, speeds = data["sections"][0]["items"], data["sections"][-1]["items"]
    assert launch[0]["text"].startswith("rank 0 of 2")
    assert any(item["name"] == "link, to another local rank over gloo" for item in speeds), speeds
