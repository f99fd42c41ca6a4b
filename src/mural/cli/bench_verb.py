"""`mural bench`: runs the benchmarks under `benchmarks/<name>/`, each by a fresh interpreter."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mural.cli.app import app
from mural.errors import MuralError

SCRIPT = "run.py"
NOT_SHIPPED = ". Benchmarks are in mural's repository and not in the installed package: run this in a checkout of it"


def benchmarks_folder() -> Path:
    """The checkout's `benchmarks` folder if mural runs from one, else the current directory's."""
    checkout = Path(__file__).resolve().parents[3]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / "benchmarks"


def benchmarks(folder: Path) -> dict[str, Path]:
    """The script of each benchmark in the folder, by name, in order; none if there is no folder.

    >>> benchmarks(Path("/nowhere"))
    {}
    """
    return {script.parent.name: script for script in sorted(folder.glob(f"*/{SCRIPT}"))}


def run_benchmark(name: str, arguments: Sequence[str] = (), folder: Path | None = None) -> int:
    """The exit code of that benchmark's script, run in the current directory with these arguments.

    The script is ended if mural is.
    """
    folder = folder or benchmarks_folder()
    found = benchmarks(folder)
    if name not in found:
        raise UnknownBenchmark(name, folder, tuple(found))
    with subprocess.Popen([sys.executable, str(found[name]), *arguments]) as script:
        before = signal.signal(signal.SIGTERM, lambda *_: script.terminate())
        try:
            return script.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


class UnknownBenchmark(MuralError, LookupError):
    """A name that no folder of benchmarks has."""

    def __init__(self, name: str, folder: Path, known: Sequence[str]) -> None:
        there = f"{folder} holds {', '.join(known)}" if known else f"there are none in {folder}"
        super().__init__(f"no benchmark is called {name!r}: {there}{'' if known else NOT_SHIPPED}")


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
        if not (found := benchmarks(folder)):
            raise typer.BadParameter(f"no benchmarks in {folder}{NOT_SHIPPED}")
        typer.echo("\n".join(found))
        return
    try:
        code = run_benchmark(name, context.args)
    except UnknownBenchmark as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)
