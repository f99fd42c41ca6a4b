"""Processes killed while they save: what was complete before is complete afterwards, and nothing else is."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from killed import STAGES, state

import mural
from mural.checkpoint.checkpoints import Checkpoints
from mural.checkpoint.folder import steps_in
from mural.checkpoint.snapshot import open_snapshot

SCRIPT = Path(__file__).with_name("killed.py")


def intact(folder: Path, step: int | None = None, rows: int = 500) -> int:
    """The step of a snapshot, all of whose tensors are of that step."""
    snapshot = open_snapshot(folder, step=step)
    assert not snapshot.passed_over
    assert snapshot.values == {"step": snapshot.step}
    for name, tensor in state(snapshot.step, rows).items():
        assert torch.equal(snapshot.tensor(name), tensor), name
    return snapshot.step


@pytest.mark.slow
def test_killed_at_every_point_of_a_save(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "stages", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    for name, (_, step, expected) in STAGES.items():
        folder = tmp_path / name
        for found in steps_in(folder):  # even before anybody cleans up, what has a name is whole
            intact(folder, found, 5)
        again = Checkpoints(folder, mural.init(), keep=2)
        assert again.steps() == expected, name
        assert sorted(path.name for path in folder.glob(".*")) == [".lock"], name
        assert intact(folder, rows=5) == expected[-1]
        again.read()
        again.save(step + 1, state(step + 1, 5), {"step": step + 1})
        again.wait()
        assert intact(folder, rows=5) == step + 1
        again.close()


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    reached = [0]
    for round in range(10):
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "forever", str(tmp_path), str(rank), "2", str(round)],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            until = time.monotonic() + 60
            while max(steps_in(tmp_path / "run"), default=0) < reached[-1] + 2:
                assert time.monotonic() < until, [rank.stderr.read() for rank in ranks if rank.poll() is not None]
                time.sleep(0.01)
            time.sleep(draw.random() * 0.5)
            os.kill(ranks[draw.randrange(2)].pid, signal.SIGKILL)
            time.sleep(draw.random() * 0.3)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        reached.append(intact(tmp_path / "run"))
        assert reached[-1] >= reached[-2] + 2, (seed, reached)
        assert all(intact(tmp_path / "run", step) == step for step in steps_in(tmp_path / "run")), seed
