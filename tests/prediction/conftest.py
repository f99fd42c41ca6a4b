"""A run that was trained once for all tests of predictions, with images of several sizes next to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import run_config, write_images
from slides import write_slides

from mural.train.loop import fit_rank


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run; the images are in `slides` next to it."""
    folder = tmp_path_factory.mktemp("trained")
    write_images(folder, 5)
    held = {"fraction": 0.4, "every": 10}
    config = run_config(folder, data__multiple=16, validation=held, checkpoint__best="mean_iou", train__steps=30)
    fit_rank(0, config)
    write_slides(folder / "slides")
    return folder / "run"
