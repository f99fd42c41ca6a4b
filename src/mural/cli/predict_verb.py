"""`mural predict`: what a trained run's model says of whole images, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from mural.cli.app import app
from mural.cli.convert_verb import extents
from mural.prediction import predict as predict_images
from mural.prediction.result_files import ResultFormat
from mural.prediction.result_form import ResultGrid
from mural.prediction.trained_run import Device
from mural.ranks.join import placement


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a run, as `mural train` wrote it.")],
    images: Annotated[list[str] | None, typer.Argument(help="Image files, folders of them, or globs.")] = None,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("predictions"),
    domain: Annotated[str | None, typer.Option(help="One of the run's domains; by default its images.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Another plan than the run's, a TOML file.")] = None,
    stream: Annotated[str | None, typer.Option(help="Extents of tiles: 1024,1024. Any image fits then.")] = None,
    devices: Annotated[int, typer.Option(min=0, help="Local ranks that share each image; 0: as the plan says.")] = 0,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: a GPU where there is one; run: as the run.")] = "run",
    multiple: Annotated[int, typer.Option(min=0, help="Pad extents to multiples of this; 0: as the run.")] = 0,
    format_: Annotated[str, typer.Option("--format", help="tiff, zarr or nifti; auto: like the image.")] = "auto",
    grid: Annotated[
        str, typer.Option(help="source: results as fine as images; level: as the run's data.level.")
    ] = "source",
    pyramid: Annotated[bool | None, typer.Option(help="Levels of results; by default above 4096 a side.")] = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Write those of all classes too.")] = False,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; by default the best, else the newest.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write a trained run's label maps of whole images, exactly as one device with enough memory would.

    Images are read, and results written, by boxes. The labels do not depend on the plan. An image whose result is
    there is skipped, so that an interrupted prediction goes on where it was. Masks are not needed.
    """
    found = predict_images(
        run,
        images or None,
        out,
        domain=domain,
        plan=plan,
        stream=extents(stream, "--stream"),
        devices=devices,
        device=cast(Device, device),
        multiple=multiple,
        format=cast(ResultFormat, format_),
        grid=cast(ResultGrid, grid),
        pyramid=pyramid,
        probabilities=probabilities,
        step=step,
        overwrite=overwrite,
    )
    if placement().rank == 0:
        typer.echo(found.words())
