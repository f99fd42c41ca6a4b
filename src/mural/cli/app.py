"""The application: what all verbs share."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from mural.checkpoint.manifest import mural_version
from mural.errors import TRACEBACK, told

app = typer.Typer(
    name="mural",
    help="mural trains vision models on images too large for one device, exactly as one device would.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script: errors that can be told in one line are one on stderr, with exit code 1."""
    try:
        app()
    except Exception as error:
        if not (text := told(error)):
            raise
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        print(f"mural: {text}", file=sys.stderr)
        sys.exit(1)


def print_version(wanted: bool) -> None:
    """Print the version and exit, if it was asked for."""
    if wanted:
        typer.echo(f"mural {mural_version()}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before a verb."""
