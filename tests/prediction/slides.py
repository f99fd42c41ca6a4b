"""Images to predict, and their prediction on the ranks that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from mural.plans import Plan
from mural.prediction.result_files import image_files
from mural.prediction.result_form import ResultStyle
from mural.prediction.trained_run import trained_run, under
from mural.prediction.whole_images import Predictions, Request, predict_rank

USUAL = ResultStyle()
SIDES = {"a": (50, 61), "b": (64, 48)}


def pixels(side: tuple[int, int], seed: int = 3) -> np.ndarray[Any, Any]:
    """An image (H, W, 3) of noise with a bright box."""
    image = np.random.default_rng(seed).integers(0, 90, (*side, 3)).astype(np.uint8)
    image[10:30, 20:40] += 120
    return image


def write_slides(folder: Path) -> None:
    """The images of all sizes; the first has a resolution."""
    folder.mkdir()
    for name, side in SIDES.items():
        options: dict[str, Any] = {"resolution": (40000, 20000), "resolutionunit": "CENTIMETER"} if name == "a" else {}
        tifffile.imwrite(folder / f"{name}.tif", pixels(side), tile=(16, 16), photometric="rgb", **options)


def predicted(
    run: Path, out: Path, plan: Plan, images: Path | None = None, style: ResultStyle = USUAL, kind: Any = "auto"
) -> Predictions:
    """A prediction on this rank, one of those that run."""
    trained = trained_run(run)
    files = image_files(images or run.parent / "slides", out, kind, False)
    request = Request(trained, tuple(files), out, False, style)
    return predict_rank(request, 0, under(trained.config, plan, None, 0))
