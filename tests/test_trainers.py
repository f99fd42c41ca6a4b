"""Lightning and Accelerate train as one device does, and raise if ranks of one image get other samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from law import TOLERANCE
from mural.data import Loader
from mural.ranks import Mesh
from sampled_training import BATCH, made, plainly_trained

SCRIPT = Path(__file__).parent / "trained_elsewhere.py"
slow = pytest.mark.slow


def found_by(folder: Path, ranks: int, *arguments: str) -> list[Any]:
    """What each rank of the script found."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(SCRIPT), *arguments, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        pytest.param("lightning", 2, marks=slow),
        pytest.param("lightning", 4, marks=slow),
        pytest.param("accelerate", 2, marks=slow),
        pytest.param("accelerate", 4, marks=slow),
    ],
)
def test_a_trainer_finds_the_losses_and_weights_of_one_device(tmp_path: Path, trainer: str, ranks: int) -> None:
    losses, state = plainly_trained()
    for found, weights in found_by(tmp_path, ranks, trainer, "own", "image"):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=TOLERANCE, atol=TOLERANCE)


@slow
def test_lightning_takes_boxes_of_a_loader_of_mural(tmp_path: Path) -> None:
    losses, _ = plainly_trained(Loader(made()[1], Mesh.of_one(), batch=BATCH).order)
    for found, _ in found_by(tmp_path, 4, "lightning", "own", "boxes"):
        assert found == pytest.approx(losses, rel=TOLERANCE)


@slow
@pytest.mark.parametrize("trainer", ["lightning", "accelerate"])
@pytest.mark.parametrize(
    ("ranks", "brought", "said"),
    [
        (2, "whole", ["has other values on ranks [1] than on rank 0", "use_distributed_sampler=False", "prepare()"]),
        (4, "own", ["ranks [1] brought other images than rank 0, which shares them", "mural.data.ImageSampler"]),
    ],
)
def test_the_sampler_that_a_trainer_puts_into_a_loader_is_refused(
    tmp_path: Path, trainer: str, ranks: int, brought: str, said: list[str]
) -> None:
    for text in found_by(tmp_path, ranks, trainer, brought, "theirs"):
        assert all(part in text for part in said), text
