"""`mural profile`: where the time of a run's steps goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mural.cli.app import app
from mural.cli.train_verbs import Devices, File, configured
from mural.errors import cannot_write
from mural.profile import chrome_trace, page
from mural.profile import profile as profiled
from mural.profile.shares_page import words
from mural.text_files import save_text
from mural.train.flags import with_flags

TRACE, PAGE = "trace.json", "profile.html"


@app.command()
@with_flags
def profile(
    file: File = None,
    devices: Devices = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them that are not.")] = 2,
    output: Annotated[Path, typer.Option(help="Folder for profile.html and trace.json.")] = Path("profile"),
    *,
    changes: Mapping[str, Any],
) -> None:
    """Take some steps of a run and say where their time goes on every rank.

    That is compute, communication by kind, idle time and waiting for images. Waiting for a rank that has not sent yet
    is idle time; from then on it is communication. Prints a table, and writes a page with plots and a
    trace for Perfetto (ui.perfetto.dev) or chrome://tracing. The run itself is not touched.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(f"--output {output}", error) from error
    found = profiled(configured(file, changes, devices), steps, warmup)
    if found is None:
        return
    save_text(output / TRACE, chrome_trace(found.notes))
    save_text(output / PAGE, page(found))
    typer.echo(f"{found.title}\nthe mean of {steps} steps:\n\n{words(found)}\n")
    typer.echo(f"written: {output / PAGE}, {output / TRACE} (open it at ui.perfetto.dev)")
