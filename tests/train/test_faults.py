"""Runs that are hurt: ranks killed at any moment, hung, asked to leave; the weights are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import run_config, write_images
from safetensors.torch import load_file

from mural.checkpoint import export
from mural.train import Config

LIMIT = 240.0
STEPS = 12


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    return folder


def described(images: Path, folder: Path, **more: Any) -> Config:
    """A run of some steps that saves after each, so that a kill meets a save often."""
    plan = more.pop("plan", {"spatial": [2, 1]})
    return run_config(images, folder, train__steps=STEPS, checkpoint__every=1, plan=plan, **more)


@contextmanager
def started(config: Config, *command: str, **environ: str) -> Generator[subprocess.Popen[str]]:
    """`mural train` on a configuration, by a launcher; it is ended if it still runs at the end."""
    file = config.folder.parent / f"{config.folder.name}.toml"
    config.save(file)
    log = (config.folder.parent / f"{config.folder.name}.log").open("w+")
    process = subprocess.Popen(
        [sys.executable, *command, "-m", "mural", "train", str(file)],
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in (*ranks_of(process.pid), process.pid):
                end(pid, signal.SIGKILL)
            process.wait(30)
        log.close()


def torchrun(restarts: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts))


def end(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def ranks_of(parent: int) -> list[int]:
    """The processes below a launcher that train, oldest first."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                text = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z" and (b"mural" in text or b"multiprocessing" in text):
                found.append(int(entry.name))
    return sorted(found)


def until(condition: Callable[[], Any], process: subprocess.Popen[str], what: str) -> Any:
    """What the condition gives when it first gives something."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        if process.poll() is not None:
            raise AssertionError(f"the run ended ({process.returncode}) before {what}")
        time.sleep(0.005)
    raise AssertionError(f"no {what} in {LIMIT} s")


def steps_seen(config: Config) -> int:
    """The last step in the journal."""
    path = config.folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["step"] if whole else 0


def saving(config: Config) -> bool:
    """Whether a save is under way: its folder is there, without its name."""
    folder = config.folder / "checkpoints"
    return folder.exists() and any(p.name.startswith(".") and p.is_dir() for p in folder.iterdir())


def weights(config: Config) -> dict[str, torch.Tensor]:
    out = config.folder / "weights.safetensors"
    export(config.folder, out)
    return load_file(out)


def same(config: Config, other: Config) -> None:
    mine, theirs = weights(config), weights(other)
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


def log_of(config: Config) -> str:
    return (config.folder.parent / f"{config.folder.name}.log").read_text()


@pytest.fixture(scope="module")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = described(images, tmp_path_factory.mktemp("undisturbed") / "run")
    with started(config, *torchrun(0)) as process:
        assert process.wait(LIMIT) == 0, log_of(config)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("case", range(10), ids=lambda n: f"kill{n}")
def test_a_killed_rank_changes_nothing(images: Path, tmp_path: Path, undisturbed: Config, case: int) -> None:
    """`kill -9` of a random rank at a random step, every other time while a save is under way."""
    draw = random.Random(case if os.environ.get("HYPOTHESIS_PROFILE") != "fresh" else None)
    config = described(images, tmp_path / "run")
    with started(config, *torchrun(2)) as process:
        step = draw.randrange(1, STEPS - 2)
        until(lambda: steps_seen(config) >= step, process, f"step {step}")
        if case % 2:
            until(lambda: saving(config), process, "a save")
        time.sleep(draw.random() * 0.05)
        victims = until(lambda: ranks_of(process.pid), process, "ranks")
        end(draw.choice(victims), signal.SIGKILL)
        assert process.wait(LIMIT) == 0, log_of(config)
    # A run that was killed before its first checkpoint was complete begins again.
    assert "resumed from step" in log_of(config) or log_of(config).count("weights;") == 2
    same(config, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"stage": 2}, {"channel": 2, "channel_layers": "all"}], ids=["stage", "channel"])
def test_a_killed_part_changes_nothing(images: Path, tmp_path: Path, plan: dict[str, Any]) -> None:
    """The same for a model in two stages, or with split layers: each rank holds, saves and restores its part."""
    whole, hurt = (described(images, tmp_path / name, plan=plan) for name in ("whole", "hurt"))
    with started(whole, *torchrun(0)) as process:
        assert process.wait(LIMIT) == 0, log_of(whole)
    with started(hurt, *torchrun(2)) as process:
        until(lambda: steps_seen(hurt) >= 4, process, "step 4")
        end(ranks_of(process.pid)[-1], signal.SIGKILL)
        assert process.wait(LIMIT) == 0, log_of(hurt)
    assert "resumed from step" in log_of(hurt)
    same(hurt, whole)


@pytest.mark.slow
def test_local_ranks_are_started_again(images: Path, tmp_path: Path, undisturbed: Config) -> None:
    config = described(images, tmp_path / "run", launch__restarts=1)
    with started(config) as process:
        until(lambda: steps_seen(config) >= 3, process, "step 3")
        end(ranks_of(process.pid)[-1], signal.SIGKILL)
        assert process.wait(LIMIT) == 0, log_of(config)
    text = log_of(config)
    assert "starting 2 local ranks" in text
    assert "SIGKILL" in text
    assert "resumed from step" in text
    same(config, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_leaves(images: Path, tmp_path: Path, undisturbed: Config, number: signal.Signals) -> None:
    config = described(images, tmp_path / "run")
    with started(config) as process:
        until(lambda: steps_seen(config) >= 2, process, "step 2")
        process.send_signal(number)
        assert process.wait(LIMIT) == 0, log_of(config)
    state = json.loads((config.folder / "status.json").read_text())
    assert state["state"] == "stopped"
    assert state["by"] == number.name
    assert 2 <= state["step"] < STEPS
    with started(config) as process:
        assert process.wait(LIMIT) == 0, log_of(config)
    same(config, undisturbed)


@pytest.mark.slow
def test_torchrun_that_is_asked_to_leave_saves(images: Path, tmp_path: Path, undisturbed: Config) -> None:
    config = described(images, tmp_path / "run")
    with started(config, *torchrun(0)) as process:
        until(lambda: steps_seen(config) >= 2, process, "step 2")
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT)
    assert json.loads((config.folder / "status.json").read_text())["state"] == "stopped"
    with started(config, *torchrun(0)) as process:
        assert process.wait(LIMIT) == 0, log_of(config)
    same(config, undisturbed)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(images: Path, tmp_path: Path, undisturbed: Config) -> None:
    """A stopped rank is found within the set time, named, and the restarted run ends as if nothing had been."""
    config = described(images, tmp_path / "run", launch__hang=6.0)
    with started(config, *torchrun(1)) as process:
        until(lambda: steps_seen(config) >= 3, process, "step 3")
        victim = ranks_of(process.pid)[1]
        end(victim, signal.SIGSTOP)
        stopped = time.monotonic()
        until(lambda: victim not in ranks_of(process.pid), process, "the end of the stopped rank")
        assert time.monotonic() - stopped < 60
        assert process.wait(LIMIT) == 0, log_of(config)
    assert f"pid {victim}" in log_of(config)
    same(config, undisturbed)
