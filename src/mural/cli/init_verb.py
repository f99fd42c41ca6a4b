"""`mural init`: a run's TOML file from a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from mural.cli.app import app
from mural.cli.graph_verb import arguments_of
from mural.survey import FirstRun, write_first_run
from mural.survey.run_facts import rows


@app.command()
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of images with masks, or with a folder for each class.")
    ],
    output: Annotated[Path, typer.Option(help="The TOML file to write.")] = Path("run.toml"),
    images: Annotated[
        list[str] | None, typer.Option(help="Image files, a glob in quotes; again for further ones. Needs --masks.")
    ] = None,
    masks: Annotated[list[str] | None, typer.Option(help="Mask files, as --images.")] = None,
    model: Annotated[
        str, typer.Option(help="package.module:callable or file.py:callable that makes the model; a U-Net by default.")
    ] = "",
    arguments: Annotated[
        str, typer.Option(help="Keyword arguments of the callable, as TOML: 'width = 32, depth = 3'.")
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Look at a folder of images and masks, and write a run that `mural train` can start, with comments.

    Images and masks are found and paired by their names. The file says what they hold, what is odd about them, and
    how the run uses this machine.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("files", total=None)
        found = write_first_run(
            folder,
            output,
            images=images or (),
            masks=masks or (),
            model=model,
            arguments=arguments_of(arguments),
            overwrite=overwrite,
            progress=lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
        )
    show(found, Console(highlight=False))


def show(found: FirstRun, console: Console) -> None:
    """Print what was found, what is odd, and what to type next."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows(found.facts):
        table.add_row(Text(name, style="bold"), Text(text))
    console.print(table)
    if found.facts.odd:
        console.print(Text("\nodd", style="bold yellow"))
    for remark in found.facts.odd:
        line = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        line.add_row("-", Text(remark, style="yellow"))
        console.print(line)
    files = ", ".join(map(str, (found.path, *found.tables)))
    first = "Look into it" if found.facts.model.made is not None else "Complete [model] in it"
    console.print(Text(f"\nwritten: {files}. {first}, then:"), Text(f"  mural train {found.path}"), sep="\n")
