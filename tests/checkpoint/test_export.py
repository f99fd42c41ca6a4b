"""Export: the plain model's state dict, in one file that safetensors reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import mural
from mural.checkpoint.checkpoints import Checkpoints
from mural.checkpoint.export import export
from mural.checkpoint.manifest import mural_version
from mural.checkpoint.pieces import Piece
from mural.checkpoint.state import state_of
from mural.errors import CheckpointError
from mural.models import UNet


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two checkpoints, of models with other weights."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", mural.init())
    for step in (1, 2):
        torch.manual_seed(step)
        model = network()
        state = state_of(model, torch.optim.Adam(model.parameters()))
        checkpoints.save(step, state.tensors, state.values)
    checkpoints.wait()
    checkpoints.close()
    return tmp_path / "run"


def network() -> nn.Module:
    model = nn.Sequential(UNet(2, 3, 2, width=4, depth=2), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1))
    model[2].weight = model[1].weight
    return model


@pytest.mark.parametrize(
    ("source", "step", "seed"),
    [("", None, 2), ("checkpoints", None, 2), ("checkpoints", 1, 1), ("checkpoints/step-00000001", None, 1)],
)
def test_the_plain_model_loads_it(run: Path, tmp_path: Path, source: str, step: int | None, seed: int) -> None:
    out = tmp_path / "model.safetensors"
    assert export(run / source, out, step).step == seed
    torch.manual_seed(seed)
    expected, model = network(), network()
    model.load_state_dict(load_file(out), strict=True)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
        assert model.state_dict()[name].dtype == value.dtype
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": str(seed), "mural": mural_version()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]


def test_a_damaged_checkpoint_is_passed_over(run: Path, tmp_path: Path) -> None:
    path = run / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    snapshot = export(run, tmp_path / "model.safetensors")
    assert snapshot.step == 1
    assert "step 2 was passed over" in snapshot.passed_over[0]
    with pytest.raises(CheckpointError, match="step 1 is intact"):
        export(run, tmp_path / "model.safetensors", 2)


def test_what_cannot_be_exported_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere holds no checkpoint"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 5, but of steps 1, 2"):
        export(run, tmp_path / "out", 5)
    with pytest.raises(CheckpointError, match=r"missing/out could not be written: No such file"):
        export(run, tmp_path / "missing" / "out")
    other = Checkpoints(tmp_path / "other", mural.init())
    other.save(1, {"model.c": torch.zeros(2, dtype=torch.complex128)}, {})
    other.save(2, {"x": torch.zeros(2)}, {})
    other.wait()
    with pytest.raises(CheckpointError, match="holds no model"):
        export(tmp_path / "other", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"c has the type torch\.complex128"):
        export(tmp_path / "other", tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


def test_tensors_in_blocks_are_put_together(tmp_path: Path) -> None:
    value = torch.rand(300, 6000)
    checkpoints = Checkpoints(tmp_path / "run", mural.init())
    checkpoints.save(1, {"model.w": Piece(value, (300, 6000), ((0, 300), (0, 6000)))}, {})
    snapshot = checkpoints.read()
    checkpoints.close()
    assert torch.equal(snapshot.tensor("model.w"), value)
    export(tmp_path / "run", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out")["w"], value)
