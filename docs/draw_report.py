"""Trains a small run and takes the screenshot of docs/how-to/report.md in a Chromium: python docs/draw_report.py"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import mural
from mural.run_report import write_report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chromium import Browser, chromium  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "report.png"


def trained(folder: Path) -> Path:
    """The folder of a run on synthetic tissue, which takes a minute or two."""
    mural.data.write_synthetic(folder, 10, 512)
    result = mural.Trainer(
        {
            "folder": str(folder / "tissue"),
            "model": {"arguments": {"classes": 3, "width": 8, "depth": 3, "norm": "batch"}},
            "data": {"images": f"{folder}/images/*.tif", "masks": f"{folder}/masks/*.tif", "batch": 2,
                     "classes": ["background", "lymphocyte", "tumour cell"]},
            "validation": {"fraction": 0.2, "write": "tiff"},
            "augment": {"flips": True, "rotations": True},
            "optimizer": {"lr": 0.003},
            "train": {"epochs": 15},
            "checkpoint": {"best": "mean_iou"},
            "log": {"every": 1, "tensorboard": "off"},
        }
    ).fit()  # fmt: skip
    return result.folder


def main() -> None:
    """Write the screenshot."""
    program = chromium()
    if program is None:
        raise SystemExit("no Chromium: run python tests/get_chromium.py, or let $CHROMIUM name one")
    with TemporaryDirectory() as folder, Browser(program, 1100, 1720) as browser:
        browser.open(write_report(trained(Path(folder))).path)
        browser.screenshot(PICTURE)


if __name__ == "__main__":
    main()
