"""The command line: each verb parses its options, then calls one public function."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from mural.bench import UnknownBenchmark, benchmarks, benchmarks_folder, run_benchmark
from mural.demo import MOST_STEPS, Settings, parse_grid, run_demo
from mural.errors import MuralError, PlanError

DEFAULTS = Settings()

app = typer.Typer(
    name="mural",
    help="mural trains vision models on images too large for one device, exactly as one device would.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script: mural's own errors are one line on stderr and exit code 1."""
    try:
        app()
    except MuralError as error:
        print(f"mural: {error}", file=sys.stderr)
        sys.exit(1)


def print_version(wanted: bool) -> None:
    """Print the version and leave, if it was asked for."""
    if wanted:
        typer.echo(f"mural {version('mural')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before a verb."""


def grid_option(text: str) -> tuple[int, int]:
    """The grid, or an error of the command line."""
    try:
        return parse_grid(text)
    except PlanError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, max=MOST_STEPS, help="Training steps.")] = DEFAULTS.steps,
    size: Annotated[int, typer.Option(min=16, help="Extent of the square image in pixels.")] = DEFAULTS.size,
    grid: Annotated[str, typer.Option(help="Rows x columns of ranks that cut the image.")] = "2x2",
    seed: Annotated[int, typer.Option(min=0, help="Of the image and of the model.")] = DEFAULTS.seed,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the picture.")] = Path("demo-out"),
) -> None:
    """Train a U-Net in one process and on a grid of local ranks, and compare every step."""
    rows_columns = grid_option(grid)
    try:
        settings = Settings(steps=steps, size=size, grid=rows_columns, seed=seed)
    except PlanError as error:
        raise typer.BadParameter(str(error)) from error
    run_demo(settings, out)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Folder under benchmarks/; without it, they are listed.")] = None,
) -> None:
    """Run a benchmark of benchmarks/NAME/run.py; what follows NAME is passed to it."""
    if name is None:
        folder = benchmarks_folder()
        typer.echo("\n".join(benchmarks(folder)) or f"no benchmarks in {folder}")
        return
    try:
        code = run_benchmark(name, context.args)
    except UnknownBenchmark as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)
