"""Takes the screenshots of docs/how-to/see-the-graph.md in a Chromium: python docs/draw_graph.py"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from mural.graph import capture
from mural.models import amoebanetd
from mural.report.graph_drawing.draw import draw

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness.vision import torchvision  # noqa: E402

from chromium import Browser, chromium  # noqa: E402

FOLDER = ROOT / "docs" / "images"


def shoot(browser: Browser, name: str, model: nn.Module, stages: Sequence[str], clicks: Sequence[str]) -> None:
    """Write the screenshot of a model, cut into stages, after clicks on blocks; the last of them stays in view."""
    with TemporaryDirectory() as folder:
        page = Path(folder) / "graph.html"
        draw(capture(model, (1, 3, 224, 224)), page, stages=stages)
        browser.open(page)
        for site in clicks:
            browser.click(f'.box[aria-label^="{site},"] > text')
        browser.screenshot(FOLDER / f"{name}.png")


def main() -> None:
    """Write all screenshots."""
    program = chromium()
    if program is None:
        raise SystemExit("no Chromium: run python tests/get_chromium.py, or let $CHROMIUM name one")
    FOLDER.mkdir(exist_ok=True)
    with torch.device("meta"):
        densenet, amoebanet = torchvision.models.densenet121(), amoebanetd(18, 208)
    stages = ["features.denseblock2", "features.denseblock3.denselayer5", "features.denseblock4"]
    cells = ["cell1_normal4", "cell3_normal2", "cell5_normal1"]
    with Browser(program, 1500, 1000) as browser:
        shoot(browser, "graph-densenet121", densenet, stages, ["features.denseblock1"])
        shoot(browser, "graph-amoebanet18", amoebanet, cells, ["cell1_normal1"])


if __name__ == "__main__":
    main()
