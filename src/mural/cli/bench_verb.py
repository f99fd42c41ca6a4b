"""`mural bench`: runs what is under benchmarks/."""

from __future__ import annotations

from typing import Annotated

import typer

from mural.bench import UnknownBenchmark, benchmarks, benchmarks_folder, run_benchmark
from mural.cli.app import app


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
