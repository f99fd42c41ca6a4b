"""Ranks, ports and worlds that are refused, and ranks that end or raise alone: nobody waits for them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from mural.ranks.store import free_port
from refusals import Bad, Said, check, refused, write_good

HERE = Path(__file__).parent
FIRST = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
SECONDS = 150
"""After which ranks count as hung."""

WORLDS = [
    Bad("a world without a rank", "", "WORLD_SIZE=2 is set, but RANK is not: set both", environ={"WORLD_SIZE": "2"}),
    Bad("a rank without a world", "", "RANK=1 is set, but WORLD_SIZE is not: set both", environ={"RANK": "1"}),
    Bad("a rank beyond the world", "", "RANK=2, but WORLD_SIZE=2", environ={**FIRST, **MEETING, "RANK": "2"}),
    Bad("a rank in words", "", "RANK='one' is not a whole number", environ={**FIRST, **MEETING, "RANK": "one"}),
    Bad("nowhere to meet", "", "MASTER_ADDR and MASTER_PORT not: set them", environ=FIRST),
    Bad("no port", "", "MASTER_PORT='x' is not a whole number", environ={**FIRST, **MEETING, "MASTER_PORT": "x"}),
    Bad("a port too high", "", "MASTER_PORT=99999 is not", environ={**FIRST, **MEETING, "MASTER_PORT": "99999"}),
    Bad("a place that is not there", "", "local rank 5 of 2", environ={**FIRST, **MEETING, "LOCAL_RANK": "5"}),
    Bad("PMIx without a world", "", "PMIX_RANK=0 is set, but no variable says", environ={"PMIX_RANK": "0"}),
    Bad("another world than the plan's", "--plan.spatial 3,1", "but the plan needs 3", environ=FIRST | MEETING),
    Bad("MPI without mpirun", "--launch.backend mpi --plan.spatial 2,1", "mpirun -n 2 mural train"),
    Bad("NCCL without GPUs", "--launch.backend nccl --plan.spatial 2,1", 'choose "gloo" or "auto"'),
]  # fmt: skip


@pytest.mark.parametrize("bad", WORLDS, ids=str)
def test_a_world_is_refused(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        environ = {**FIRST, **MEETING, "MASTER_PORT": port}
        refused(Bad("a port", "", f"port {port} of 127.0.0.1 is taken", environ=environ), tmp_path)


def test_messages_over_mpi_without_mpi4py(tmp_path: Path) -> None:
    with patch.dict(sys.modules, {"mpi4py": None, "mpi4py.MPI": None}):
        refused(Bad("no mpi4py", "--launch.backend mpi", 'pip install "mural-train[mpi]"'), tmp_path)


# -- processes ---------------------------------------------------------------------------------------------------------


def launched(folder: Path, *commands: str, **environs: dict[str, str]) -> list[Said]:
    """What several command lines say that run next to each other, each with variables of its own."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "mural", "train", "run.toml", *command.split()], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        )
        for command, environ in zip(commands, environs.values() or [{}] * len(commands), strict=True)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [Said(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    write_good(tmp_path)
    for name in ("odd_models.py", "odd_ranks.py"):
        shutil.copy(HERE / name, tmp_path)
    return tmp_path


STAGES = "--plan.stage 2 --model.arguments {} --model.factory"
CUT = "--plan.spatial 2,1 --model.arguments {} --model.factory"

LOCAL = [
    ("--plan.stage 2 --model.arguments clases=3", "does not take 'clases': did you mean 'classes'?"),
    (f"{STAGES} odd_ranks.py:raising_on_one", "RuntimeError: rank 1 has no licence (odd_ranks.py, line"),
    (f"{STAGES} odd_models.py:of_grey_images", "in the layer 1 (Conv2d), for images of shape (3, 32, 32)"),
    (f"{STAGES} odd_models.py:Nested", "in the layer inner (Joining) (odd_models.py, line"),
    (f"{CUT} odd_models.py:Nested", "in the layer inner (Joining) (odd_models.py, line"),
    (f"{CUT} odd_models.py:WithoutRule", "linalg_inv has no rule for sharded tensors"),
    ("--plan.spatial 2,1,1", "write 2 sizes, as spatial = [2, 1]"),
    ("--plan.channel 2", "the model has no linear layer"),
    ("--plan.spatial 2,1 --train.steps 4 --loss.name odd_ranks.py:ending_one", "was ended by SIGKILL"),
    ("--plan.stage 2 --loss.name odd_ranks.py:raising_in_a_step", "ValueError: this step fails"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "words"), LOCAL)
def test_local_ranks_end_with_one_line(command: str, words: str, run_folder: Path) -> None:
    (said,) = launched(run_folder, command)
    check(Bad("local ranks", command, words), said)


WORLD = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}


def by_hand(folder: Path, command: str, **second: str) -> list[Said]:
    """What two ranks say that were started by hand."""
    meet = {**WORLD, "MASTER_PORT": str(free_port())}
    ranks = [{**meet, "RANK": "0", "LOCAL_RANK": "0"}, {**meet, "RANK": "1", "LOCAL_RANK": "1", **second}]
    return launched(folder, command, command, first=ranks[0], second=ranks[1])


@pytest.mark.slow
def test_ranks_of_different_worlds(run_folder: Path) -> None:
    """They waited for each other for half an hour."""
    for said in by_hand(run_folder, "", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3"):
        check(Bad("worlds", "", "but another one with"), said)


@pytest.mark.slow
def test_a_rank_that_raises_alone_at_the_start_ends_the_other(run_folder: Path) -> None:
    said = by_hand(run_folder, f"{STAGES} odd_ranks.py:raising_on_one")
    check(Bad("the other", "", "the start of the run failed on rank 1: RuntimeError: rank 1 has no licence"), said[0])
    check(Bad("the one", "", "RuntimeError: rank 1 has no licence (odd_ranks.py, line"), said[1])


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_other(run_folder: Path) -> None:
    said = by_hand(run_folder, "--plan.spatial 2,1 --train.steps 4 --loss.name odd_ranks.py:ending_one")
    check(Bad("the other", "", ("waiting for rank 1", "has ended: see the logs")), said[0])
    assert said[1].code == -9
