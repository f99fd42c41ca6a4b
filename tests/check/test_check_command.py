"""`mural check`: it prints the verdict, and its exit code tells whether the plan differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import write_images
from typer.testing import CliRunner, Result

from mural import cli

MODEL = """
import torch
from torch import nn
import mural

class Net(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.conv, self.factor = nn.Conv2d(3, 2, 3, padding=1), factor

    def forward(self, x):
        return self.conv(x) * self.factor if isinstance(x, mural.ShardedTensor) else self.conv(x)
"""
RUN = """
folder = "{folder}/run"
model = {{ factory = "{folder}/net_of_check.py:Net", arguments = {{ factor = {factor} }} }}
data = {{ images = "{folder}/images/*.tif", masks = "{folder}/masks/*.tif", batch = 2 }}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path, count=2)
    (tmp_path / "net_of_check.py").write_text(MODEL)
    return tmp_path


def call(folder: Path, factor: float) -> Result:
    (folder / "run.toml").write_text(RUN.format(folder=folder, factor=factor))
    return CliRunner().invoke(cli.app, ["check", str(folder / "run.toml")], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_the_command_prints_a_verdict(folder: Path) -> None:
    result = call(folder, 1.0)
    assert result.exit_code == 0, result.output
    assert "exact: over 3 steps, rounding explains every difference" in result.output


def test_the_command_fails_where_the_plan_differs(folder: Path) -> None:
    result = call(folder, 1.01)
    assert result.exit_code == 1
    assert "differs: " in result.output
    assert "where rounding explains" in result.output
    assert "gradient of conv." in result.output
