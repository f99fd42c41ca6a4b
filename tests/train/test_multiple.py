"""Images padded to a multiple: what the model sees, what counts, and what is written, under any plan."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from runs import run_config, write_images

from mural.errors import DataError
from mural.train.config import Config
from mural.train.loop import fit_rank
from mural.train.start import start
from ranks import run_on

SIDE = 43
PLANS = {"rank": {}, "ranks": {"spatial": [2, 1]}, "streamed": {"stream": [24, 24]}}


def padded_run(folder: Path, name: str) -> Config:
    held = {"images": str(folder / "images/[01].tif"), "masks": str(folder / "masks/[01].tif"), "write": "tiff"}
    more = {"data__multiple": 16, "model__dtype": "float64", "train__steps": 2, "validation": held}
    return run_config(folder, name, plan=PLANS[name], **more)


def fit(config: Config) -> float:
    return fit_rank(0, config).loss


def test_padding_is_zeros_that_the_loss_ignores(tmp_path: Path) -> None:
    write_images(tmp_path, 2, side=SIDE)
    with start(run_config(tmp_path, data__multiple=16)) as run:
        image, target = next(iter(run.loader.epoch(0))).whole()
    assert image.shape == (2, 3, 48, 48)
    assert not image[..., SIDE:].any()
    assert not image[:, :, SIDE:].any()
    inside = torch.zeros(48, 48, dtype=torch.bool)
    inside[:SIDE, :SIDE] = True
    assert ((target == -100) == ~inside).all()


def test_padded_runs_are_equal_on_a_rank_on_ranks_and_streamed(tmp_path: Path) -> None:
    write_images(tmp_path, 4, side=SIDE)
    configs = {name: padded_run(tmp_path, name) for name in PLANS}
    losses = {name: run_on(2 if name == "ranks" else 1, fit, config)[0] for name, config in configs.items()}
    assert losses["ranks"] == pytest.approx(losses["rank"], rel=1e-10)
    assert losses["streamed"] == pytest.approx(losses["rank"], rel=1e-10)
    written = {name: tifffile.imread(sorted((c.folder / "predictions").glob("*/1.tif"))) for name, c in configs.items()}
    assert written["rank"].shape[-2:] == (SIDE, SIDE)
    assert np.array_equal(written["rank"], written["ranks"])
    assert np.array_equal(written["rank"], written["streamed"])
    last = json.loads((configs["rank"].folder / "metrics.jsonl").read_text().splitlines()[-1])
    truth = [tifffile.imread(tmp_path / f"masks/{n}.tif") for n in (0, 1)]
    found = [tifffile.imread(sorted((configs["rank"].folder / "predictions").glob(f"*/{n}.tif"))[-1]) for n in (0, 1)]
    assert last["accuracy"] == pytest.approx(np.mean([np.mean(t == f) for t, f in zip(truth, found, strict=True)]))


def test_a_loss_that_would_count_the_padding_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path, 2, side=SIDE)
    own = tmp_path / "own.py"
    own.write_text("def loss(output, target): return (output[:, 0] - target).abs().mean()\n")
    config = run_config(tmp_path, data__multiple=16, data__mask="values", loss={"name": f"{own}:loss"})
    with pytest.raises(DataError, match=r"data\.multiple = 16.*the loss would count the padding"):
        fit_rank(0, config)
