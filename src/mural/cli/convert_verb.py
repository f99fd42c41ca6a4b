"""`mural convert`: any image as sharded OME-Zarr."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mural.cli.app import app
from mural.data import convert as convert_image
from mural.errors import ConfigError


def extents(text: str | None, flag: str) -> tuple[int, ...] | None:
    """Numbers with commas between them.

    >>> extents("3,512,512", "--chunks")
    (3, 512, 512)
    """
    if text is None:
        return None
    try:
        return tuple(int(n) for n in text.replace("x", ",").split(","))
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: give one extent per dim, as in 3,512,512") from None


@app.command()
def convert(
    image: Annotated[Path, typer.Argument(metavar="IN", help="Any image that mural reads.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="NAME.ome.zarr, or NAME.tif.")],
    chunks: Annotated[str | None, typer.Option(help="Extents of a chunk, channels first: 3,512,512.")] = None,
    shard: Annotated[str | None, typer.Option(help="Extents of a file of chunks, multiples of a chunk's.")] = None,
    levels: Annotated[
        int | None, typer.Option(min=1, help="Levels of the pyramid; by default until one chunk.")
    ] = None,
    labels: Annotated[bool, typer.Option("--labels", help="Classes, not brightness: levels keep values.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Shards under way at once.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write any image as sharded OME-Zarr with a pyramid, in bounded memory."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(image.name, total=None)
        written = convert_image(
            image,
            out,
            chunks=extents(chunks, "--chunks"),
            shard=extents(shard, "--shard"),
            levels=levels,
            labels=labels,
            workers=workers,
            overwrite=overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    typer.echo(f"{written} is complete")
