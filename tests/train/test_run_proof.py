"""A run proves its plan before its first step, says so, remembers it, and does not begin where it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import run_config, write_images

from mural.errors import ProofError
from mural.train import Config
from mural.train.loop import fit_rank
from ranks import run_on

WRONG = """
from mural import ShardedTensor
from mural.models import UNet

class Wrong(UNet):
    def forward(self, x):
        return super().forward(x) * (1.01 if isinstance(x, ShardedTensor) and x.placement.mesh.world > 1 else 1)

def wrong():
    return Wrong(classes=2, width=4, depth=2)
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path)
    return tmp_path


def proving(images: Path, name: str = "run", **changes: Any) -> Config:
    return run_config(images, name, **{"train__steps": 2, "train__prove": True, **changes})


def test_a_run_says_what_it_proved_and_remembers_it(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = proving(images, plan={"stream": [20, 20]})
    fit_rank(0, config)
    (proof,) = (config.folder / "proofs").glob("*.json")
    assert "proved in" in capsys.readouterr().out.replace("\n", " ")
    fit_rank(0, proving(images, plan={"stream": [20, 20]}, checkpoint={"resume": "auto"}, train__steps=3))
    said = capsys.readouterr().out.replace("\n", "")
    assert "proved remembered from" in said
    assert proof.name in said
    fit_rank(0, proving(images, name="without", plan={"stream": [20, 20]}, train__prove=False))
    fit_rank(0, proving(images, name="plain"))
    assert "proved in" not in capsys.readouterr().out
    assert not (images / "plain" / "proofs").exists()


def fitted(images: Path) -> str:
    model = {"factory": f"{images}/wrong.py:wrong", "arguments": {}}
    try:
        fit_rank(0, proving(images, model=model, plan={"spatial": [2, 1]}))
    except ProofError as error:
        return str(error)
    return "it ran"


def test_a_run_whose_plan_differs_does_not_begin(images: Path) -> None:
    (images / "wrong.py").write_text(WRONG)
    for text in run_on(2, fitted, images):
        assert "the plan (spatial = [2, 1]) does not give the result of one device" in text
        assert f"`mural check {images}/run/config.toml`" in text
    assert not list((images / "run").glob("proofs/*"))
    assert not list((images / "run" / "checkpoints").glob("step*"))
