"""`mural train`, `mural check` and `mural export`: runs, described by a TOML file and flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mural.checkpoint import export
from mural.cli.app import app
from mural.ranks.join import placement
from mural.train import Config, Trainer, check_run
from mural.train.config import merged
from mural.train.flags import changed, with_flags
from mural.typed import dump

File = Annotated[Path | None, typer.Argument(help="The run's configuration, a TOML file; flags change its fields.")]
Devices = Annotated[int | None, typer.Option(min=1, help="Local ranks to start: short for --launch.devices.")]


def configured(file: Path | None, changes: Mapping[str, Any], devices: int | None) -> Config:
    """The configuration of a file, with flags."""
    every = changed(changes, launch__devices=devices)
    return Config.of(merged({}, every)) if file is None else Config.load(file, every)


@app.command()
@with_flags
def train(
    file: File = None,
    devices: Devices = None,
    show: Annotated[bool, typer.Option("--show", help="Print the resolved configuration and exit.")] = False,
    *,
    changes: Mapping[str, Any],
) -> None:
    """Train what a TOML file describes, and resume it if it was interrupted.

    Every field of the file is a flag too: --optimizer.lr 0.01, --plan.spatial 2,2. Under torchrun, mpirun or srun the
    ranks are theirs; without a launcher, as many local ranks are started as the plan needs, or --devices says.
    """
    config = configured(file, changes, devices)
    if show:
        typer.echo(dump(config), nl=False)
        return
    result = Trainer(config).fit()
    if placement().rank == 0:
        typer.echo(result.words())


@app.command()
@with_flags
def check(file: File = None, devices: Devices = None, *, changes: Mapping[str, Any]) -> None:
    """Compare steps of a run under its plan with plain autograd on one device, on the first batch.

    Every rank runs the whole image as well, so take a run whose image fits. The exit code is 1 where they differ by
    more than rounding.
    """
    found = check_run(configured(file, changes, devices))
    if placement().rank == 0:
        typer.echo(str(found))
    if not found.exact:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; the newest by default.")] = None,
) -> None:
    """Write the plain model's weights of a run to a safetensors file, under the names that its state_dict has."""
    snapshot = export(run, out, step)
    typer.echo(f"{out}: the weights of step {snapshot.step}")
