"""The run whose model predicts: a U-Net, trained for some seconds on boxes of such an image."""

from __future__ import annotations

from pathlib import Path

import mural
from mural.train import Config
from whole_image.parts import Sizes
from whole_image.textures import CLASSES, write_file

SIDE = 2048
SEED = 1
"""Of the image that it is trained on: its regions and pixels are not those that are predicted."""


def run_config(folder: Path, sizes: Sizes, device: str) -> Config:
    """The configuration of the run."""
    side = min(SIDE, 8 * sizes.window)
    image, mask = (write_file(folder, side, kind, SEED) for kind in (False, True))
    files = {"images": str(image), "masks": str(mask)}
    network = {"classes": CLASSES, "width": sizes.width, "depth": sizes.depth, "norm": "batch"}
    return Config.of({
        "folder": str(folder / f"run-{sizes.width}-{sizes.depth}"),
        "model": {"factory": "mural.models:UNet", "arguments": network},
        "data": {**files, "crop": [sizes.window, sizes.window], "batch": 4, "repeat": 4 * sizes.steps},
        "optimizer": {"name": "AdamW", "lr": 2e-3},
        "schedule": {"name": "cosine", "warmup": 5},
        "train": {"steps": sizes.steps},
        "log": {"every": 50, "tensorboard": "off"},
        "launch": {"device": device},
    })  # fmt: skip


def trained(folder: Path, sizes: Sizes, device: str) -> Path:
    """The folder of the run, trained unless it is there."""
    config = run_config(folder, sizes, device)
    done = config.folder / "trained"
    if not done.is_file():
        mural.Trainer(config).fit()
        done.write_text("")
    return config.folder
