"""Small runs for tests: a folder of images with masks, and the configuration that trains on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from mural.train import Config

SIDE = 48


def write_images(folder: Path, count: int = 6, side: int = SIDE, seed: int = 0) -> None:
    """Images of discs on noise, each with a mask of the discs, as tiled TIFF."""
    draw = np.random.default_rng(seed)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    rows, columns = np.mgrid[:side, :side]
    for index in range(count):
        mask = np.zeros((side, side), np.uint8)
        for _ in range(4):
            y, x, r = draw.integers(4, side - 4), draw.integers(4, side - 4), draw.integers(4, 9)
            mask[(rows - y) ** 2 + (columns - x) ** 2 < r * r] = 1
        image = draw.integers(0, 90, (side, side, 3)).astype(np.uint8)
        image[mask == 1] += 120
        tifffile.imwrite(folder / "images" / f"{index}.tif", image, tile=(16, 16), photometric="rgb")
        tifffile.imwrite(folder / "masks" / f"{index}.tif", mask, tile=(16, 16))


def run_config(folder: Path, name: str = "run", **changes: Any) -> Config:
    """A short run on those images; `changes` are fields by name, with __ for the dot."""
    tables: dict[str, Any] = {
        "folder": str(folder / name),
        "model": {"factory": "mural.models:UNet", "arguments": {"classes": 2, "width": 4, "depth": 2, "norm": "batch"}},
        "data": {"images": str(folder / "images/*.tif"), "masks": str(folder / "masks/*.tif"), "batch": 2},
        "optimizer": {"name": "SGD", "lr": 0.1, "arguments": {"momentum": 0.9}},
        "train": {"steps": 6, "prove": False},
        "checkpoint": {"every": 2},
        "log": {"every": 1, "tensorboard": "off"},
        "launch": {"hang": 60.0},
    }
    for key, value in changes.items():
        table, _, field = key.partition("__")
        if field:
            tables.setdefault(table, {})[field] = value
        else:
            tables[table] = value
    return Config.of(tables)
