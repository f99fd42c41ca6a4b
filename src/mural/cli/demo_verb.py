"""`mural demo`: the same training in one process and on a grid of local ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mural.cli.app import app
from mural.demo import MOST_STEPS, Settings, parse_grid, run_demo
from mural.errors import PlanError

DEFAULTS = Settings()


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, max=MOST_STEPS, help="Training steps.")] = DEFAULTS.steps,
    size: Annotated[int, typer.Option(min=16, help="Extent of the square image in pixels.")] = DEFAULTS.size,
    grid: Annotated[str, typer.Option(help="Rows x columns of ranks that cut the image.")] = "2x2",
    seed: Annotated[int, typer.Option(min=0, help="Of the image and of the model.")] = DEFAULTS.seed,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the picture.")] = Path("demo-out"),
) -> None:
    """Train a U-Net in one process and on a grid of local ranks, and compare every step."""
    try:
        settings = Settings(steps=steps, size=size, grid=parse_grid(grid), seed=seed)
    except PlanError as error:
        raise typer.BadParameter(str(error)) from error
    run_demo(settings, out)
