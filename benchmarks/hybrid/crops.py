"""Crops of the colour images that scikit-image and scikit-learn bring along: the class is which image it was.

Every image is divided into squares of 64 pixels; of each four, one is for tests. A crop of 32 × 32 lies inside of one
square, so that no pixel is in a training crop and in a test crop:

    T · · ·      T: test, ·: training
    · · T ·
    T · · ·
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIDE, SQUARE = 32, 64
BUNDLED = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
"""Colour images inside of scikit-image's wheel: nothing is downloaded."""
Picture = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Crops:
    """Crops (n, 3, 32, 32) in bytes, and the number of the image that each is from."""

    pixels: Tensor
    labels: Tensor
    dtype: torch.dtype = torch.float32
    """Of the numbers that a model gets."""

    def to(self, device: str, dtype: torch.dtype) -> Crops:
        """The same on a device, for a model of that type."""
        return Crops(self.pixels.to(device), self.labels.to(device), dtype)

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Some of them as a model takes them, and their classes."""
        return self.normalized(self.pixels[chosen]), self.labels[chosen]

    def images(self) -> Tensor:
        """All of them as a model takes them."""
        return self.normalized(self.pixels)

    def normalized(self, pixels: Tensor) -> Tensor:
        """Bytes as numbers around 0."""
        return pixels.to(self.dtype).div_(127.5).sub_(1.0)


def pictures() -> dict[str, Picture]:
    """The bundled colour images that are here, by name."""
    found = {**from_skimage(), **from_sklearn()}
    if len(found) < 2:
        raise SystemExit(
            "the crops are cut from images that come with scikit-image and scikit-learn: "
            'pip install "mural-train[samples]" scikit-learn'
        )
    return found


def from_skimage() -> dict[str, Picture]:
    """Those of scikit-image, an optional package."""
    try:
        import skimage  # noqa: PLC0415
        from skimage.io import imread  # noqa: PLC0415
    except ImportError:
        return {}
    folder = Path(skimage.__file__).parent / "data"
    return {Path(name).stem: imread(folder / name)[..., :3] for name in BUNDLED if (folder / name).is_file()}


def from_sklearn() -> dict[str, Picture]:
    """Those of scikit-learn, an optional package."""
    try:
        from sklearn.datasets import load_sample_images  # noqa: PLC0415
    except ImportError:
        return {}
    found: Any = load_sample_images()
    return {Path(name).stem: image for name, image in zip(found.filenames, found.images, strict=True)}


def squares(picture: Picture, test: bool) -> list[tuple[int, int]]:
    """The corners of the squares of one kind.

    >>> blank = np.zeros((128, 256, 3), np.uint8)
    >>> squares(blank, test=True), len(squares(blank, test=False))
    ([(0, 0), (64, 128)], 6)
    """
    rows, columns = picture.shape[0] // SQUARE, picture.shape[1] // SQUARE
    places = ((row, column) for row in range(rows) for column in range(columns))
    return [(SQUARE * r, SQUARE * c) for r, c in places if ((2 * r + c) % 4 == 0) == test]


def cut(each: int, test: bool, seed: int) -> Crops:
    """As many crops of every image, at random places in the squares of one kind; the same on every rank."""
    draw = np.random.default_rng([seed, int(test)])
    pixels: list[Picture] = []
    labels: list[int] = []
    for label, picture in enumerate(pictures().values()):
        corners = squares(picture, test)
        for _ in range(each):
            top, left = corners[draw.integers(len(corners))] + draw.integers(0, SQUARE - SIDE + 1, 2)
            pixels.append(picture[top : top + SIDE, left : left + SIDE])
            labels.append(label)
    stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return Crops(stacked, torch.tensor(labels))
