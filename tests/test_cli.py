"""The command line: its verbs, its errors, and one whole run of the demo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.progress import Progress
from typer.testing import CliRunner, Result

from mural import cli
from mural.checkpoint.manifest import mural_version
from mural.demo import Settings
from mural.demo.both_runs import DemoStep
from mural.demo.course import Disagreement, ProgressBoard
from mural.errors import PlanError


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks with one, `echo`, that writes its arguments and exits with 7."""
    script = tmp_path / "benchmarks" / "echo" / "run.py"
    script.parent.mkdir(parents=True)
    script.write_text("import sys; open(sys.argv[1], 'w').write(' '.join(sys.argv[2:])); sys.exit(7)")
    monkeypatch.setattr(cli.bench_verb, "benchmarks_folder", lambda: tmp_path / "benchmarks")
    return tmp_path


def test_help_names_the_verbs_and_the_defaults() -> None:
    assert all(verb in call("--help").output for verb in ("demo", "bench"))
    assert all(default in call("demo", "--help").output for default in ("512", "2x2", "demo-out"))


def test_version() -> None:
    assert call("--version").output.strip() == f"mural {mural_version()}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dmeo"], "dmeo"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--steps", "many"], "integer"),
        (["demo", "--grid", "2by2"], "rows x columns"),
        (["demo", "--grid", "9x9"], "81 ranks"),
        (["demo", "--size", "16", "--grid", "4x1"], "choose 64 or more"),
    ],
)
def test_a_wrong_word_is_a_short_error_with_code_2(arguments: list[str], said: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_murals_errors_are_one_line_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise PlanError("the grid does not fit")

    monkeypatch.setattr(cli.demo_verb, "run_demo", fail)
    monkeypatch.setattr(sys, "argv", ["mural", "demo"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 1
    assert capsys.readouterr().err == "mural: the grid does not fit\n"


def test_a_benchmark_ends_with_mural(tmp_path: Path) -> None:
    """`timeout 60 mural bench …` left the benchmark running."""
    script = tmp_path / "sleep" / "run.py"
    script.parent.mkdir()
    script.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    code = f"from mural.cli.bench_verb import *; run_benchmark('sleep', [], Path({str(tmp_path)!r}))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as mural:
        assert mural.stdout is not None
        benchmark = int(mural.stdout.readline())
        mural.terminate()
        mural.wait(timeout=20)
    with pytest.raises(ProcessLookupError):
        os.kill(benchmark, 0)


def test_bench_lists_the_benchmarks(folder: Path) -> None:
    assert call("bench").output.split() == ["echo"]


def test_bench_says_when_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.bench_verb, "benchmarks_folder", lambda: tmp_path)
    """From an installed package it found nothing, and the exit code was 0."""
    for arguments in (["bench"], ["bench", "bigconv"]):
        result = call(*arguments)
        assert result.exit_code == 2
        assert "in mural's repository" in " ".join(result.output.replace("│", " ").split())


def test_bench_refuses_an_unknown_name_and_lists_the_known(folder: Path) -> None:
    result = call("bench", "eco")
    assert result.exit_code == 2
    assert "'eco'" in result.output
    assert "echo" in result.output


def test_bench_passes_arguments_and_exit_code_through(folder: Path) -> None:
    written = folder / "written"
    assert call("bench", "echo", str(written), "--help", "--steps", "3").exit_code == 7
    assert written.read_text() == "--help --steps 3"


@pytest.mark.parametrize(
    ("loss", "difference", "what"), [(1.0, 2e-9, "gradients"), (1.0, float("nan"), "gradients"), (1.1, 0.0, "loss")]
)
def test_demo_refuses_numbers_that_differ(loss: float, difference: float, what: str) -> None:
    board = ProgressBoard(Settings(grid=(1, 1)), Progress())
    board.steps["plain"][1] = [DemoStep("plain", 1, 1.0, 0.0)]
    board.steps["sharded"][1] = [DemoStep("sharded", 1, 1.0, 1e-15)]
    assert board.check() == 1e-15
    board.steps["sharded"][1] = [DemoStep("sharded", 1, loss, difference)]
    with pytest.raises(Disagreement, match=f"step 1: {what}"):
        board.check()


@pytest.mark.slow
def test_demo_compares_every_step_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("demo", "--size", "70", "--steps", "2", "--grid", "2x2")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    rows = [words for words in lines if words and words[0] in ("1", "2")]
    assert [words[0] for words in rows] == ["1", "2"]
    assert all(float(plain) == pytest.approx(float(ranks), rel=1e-12) for _, plain, ranks, _ in rows)
    assert all(float(difference) < 1e-10 for *_, difference in rows)
    assert "kept for backward" in result.output
    with Image.open(Path("demo-out") / "demo.png") as picture:
        assert picture.width > picture.height > 700
