"""Draws docs/images/predict-sliding-window.png: a whole image next to a window that slides over it.

python docs/draw_sliding_window.py    trains a small U-Net for two minutes on a CPU; needs matplotlib and MONAI
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tifffile
import torch
from monai.inferers import sliding_window_inference
from PIL import Image

import mural
from mural.checkpoint import open_snapshot, restore
from mural.prediction.trained_run import trained_run
from mural.train import Config
from mural.train.factory import make_model

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness.plots import pyplot  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "predict-sliding-window.png"
WINDOW, OVERLAP = 192, 0.25
EXTENTS = (640, 896)
RADII = (24, 120)
COLOURS = 48
"""Of the file."""
Array = np.ndarray[Any, Any]


def rings(extents: tuple[int, int], seed: int) -> tuple[Array, Array]:
    """An image of thin rings on noise, blue and red, and its mask: what lies within a blue one.

    Whether a pixel does shows at the ring alone, which may be far away.
    """
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[: extents[0], : extents[1]]
    image = draw.normal(150, 25, (*extents, 1)).repeat(3, 2)
    mask, taken = np.zeros(extents, np.uint8), np.zeros(extents, bool)
    for radius in sorted(draw.integers(*RADII, 400), reverse=True):
        y, x = (int(draw.integers(0, extent)) for extent in extents)
        distance = np.hypot(rows - y, columns - x)
        if taken[distance < radius + 6].any():
            continue
        taken |= distance < radius + 6
        blue = draw.random() < 0.6
        mask[distance < radius] = blue
        image[np.abs(distance - radius) < 2] = (60, 60, 160) if blue else (160, 60, 60)
    return image.clip(0, 255).astype(np.uint8), mask


def trained(folder: Path) -> Path:
    """The folder of a run on such images, each of them whole."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir()
    for number in range(24):
        for kind, pixels in zip(("images", "masks"), rings((512, 512), number), strict=True):
            tifffile.imwrite(folder / kind / f"{number}.tif", pixels)
    network = {"classes": 2, "width": 8, "depth": 5, "norm": "batch"}
    config = Config.of({
        "folder": str(folder / "run"),
        "model": {"factory": "mural.models:UNet", "arguments": network},
        "data": {"images": f"{folder}/images/*.tif", "masks": f"{folder}/masks/*.tif",
                 "repeat": 100},
        "augment": {"flips": True, "rotations": True},
        "optimizer": {"name": "AdamW", "lr": 3e-3},
        "schedule": {"name": "cosine", "warmup": 10},
        "train": {"steps": 500},
        "log": {"every": 50, "tensorboard": "off"},
    })  # fmt: skip
    mural.Trainer(config).fit()
    return config.folder


def by_window(run: Path, image: Array) -> Array:
    """The labels by windows that slide, as MONAI has it: overlapping, their scores averaged."""
    known = trained_run(run)
    model = make_model(known.config.model, known.config.seed)
    restore(open_snapshot(known.checkpoints, None, known.step), model)
    pixels = torch.from_numpy(image).movedim(-1, 0)[None] / 255
    with torch.no_grad():
        scores: Any = sliding_window_inference(pixels, (WINDOW, WINDOW), 4, model.eval(), overlap=OVERLAP)
    return scores.argmax(1)[0].numpy()


def draw(image: Array, mask: Array, whole: Array, window: Array) -> Any:
    """The four panels."""
    differ = whole != window
    count = int(differ.sum())
    titles = {
        "the image: what is within a blue ring?": image,
        f"whole image: {share(whole, mask)} right": whole,
        f"window of {WINDOW}² with {OVERLAP:.0%} overlap: {share(window, mask)} right": window,
        f"{count:,} pixels differ ({count / differ.size:.1%})": differ,
    }
    figure, axes = pyplot().subplots(2, 2, figsize=(9.6, 7.4), layout="constrained")
    for axis, (title, picture) in zip(axes.flat, titles.items(), strict=True):
        axis.imshow(picture, cmap="gray_r" if picture is differ else "Blues", interpolation="nearest")
        axis.set_title(title, fontsize=10)
        axis.axis("off")
    return figure


def share(labels: Array, mask: Array) -> str:
    """The share of right pixels."""
    return f"{(labels == mask).mean():.1%}"


def main() -> None:
    """Train, predict both ways, and draw."""
    image, mask = rings(EXTENTS, 1000)
    with TemporaryDirectory() as name:
        folder = Path(name)
        run = trained(folder)
        tifffile.imwrite(folder / "rings.tif", image, tile=(256, 256), photometric="rgb")
        found = mural.predict(run, folder / "rings.tif", folder / "labels", stream=(256, 256))
        whole = tifffile.imread(found.files[0])
        figure = draw(image, mask, whole, by_window(run, image))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=100)
    with Image.open(PICTURE) as picture:
        picture.convert("RGB").quantize(COLOURS).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
