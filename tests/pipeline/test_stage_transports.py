"""The law of stages over other transports: one that behaves like NCCL, and MPI under a real mpirun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mpi_stages import CASES
from stage_cases import Case, holds

import mural

sys.path.append(str(Path(__file__).parents[1] / "comm"))
from test_mpi import launch, needs_mpi

RANKS = 4
STRICT = [
    Case("unet", mural.Plan(stage=2, schedule="1f1b", microbatches=3, batchnorm="micro"), images=5),
    Case("tied", mural.Plan(stage=2, schedule="gems", microbatches=4, batchnorm="micro"), sizes=((9, 8),) * 3),
    Case("fan", mural.Plan(stage=2, schedule="interleaved", microbatches=3), images=5, sizes=((9, 8),) * 3),
    Case("several", mural.Plan(stage=2, schedule="gpipe", microbatches=2), sizes=((8, 8),) * 3),
]


@pytest.mark.parametrize("case", STRICT, ids=str)
def test_stages_on_a_transport_like_nccl(case: Case) -> None:
    holds(case, backend="strict")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_on_grids_on_a_transport_like_nccl(case: Case) -> None:
    holds(case, backend="strict")


@needs_mpi
@pytest.mark.slow
def test_stages_over_mpi(tmp_path: Path) -> None:
    script = Path(__file__).parent / "mpi_stages.py"
    run = launch(RANKS, str(script), str(tmp_path))
    files = [tmp_path / f"{rank}.json" for rank in range(RANKS)]
    assert all(file.exists() for file in files), run.stdout + run.stderr
    assert run.returncode == 0, run.stdout + run.stderr
    for rank, file in enumerate(files):
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found == {str(case): {} for case in CASES}, f"rank {rank}: {found}"
