"""`mural report`: what a run did, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mural.cli.app import app
from mural.run_report import write_report


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, as `mural train` wrote it.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write; by default report.html in the run's folder.")
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(help="A folder of `mural predict`, for the pictures; by default what validation.write wrote."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file of --out even if it is not a report.")
    ] = False,
) -> None:
    """Write a page that tells what a run did: how it ended, its curves, pictures, speed and memory, and what was run.

    The page is one file that needs nothing else. The run may still be running; only the page is written.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("journal", total=None)
        found = write_report(
            run,
            out,
            predictions,
            overwrite=overwrite,
            progress=lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
        )
    if found.damaged:
        typer.echo(f"left out: {found.damaged} damaged line{'s' * (found.damaged > 1)} of the journal", err=True)
    typer.echo(f"{found.headline}\nwritten: {found.path}")
