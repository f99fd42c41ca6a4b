"""`mural doctor`: what a run would find here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mural.cli.app import app
from mural.doctor import examine


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Whose disk is measured.")] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    measure: Annotated[bool, typer.Option(help="Measure memory, link and disk: a few seconds.")] = True,
) -> None:
    """Say how this process was started, what the machine has, how fast it is, and what is missing for each feature."""
    examine(folder, measure).show(Console(), json)
