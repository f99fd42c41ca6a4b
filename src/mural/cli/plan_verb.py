"""`mural plan`: which plan runs a model within a device's memory, and why, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from mural.cli.app import app
from mural.cli.convert_verb import extents
from mural.cli.graph_verb import Model, config_of
from mural.errors import ConfigError
from mural.planner import plan as planned
from mural.train.factory import make_meta_model

PRECISIONS = ("float32", "bfloat16")


@app.command()
def plan(
    model: Model,
    image: Annotated[str, typer.Option(help="Shape of one image: 3,4096,4096.")],
    memory: Annotated[
        str, typer.Option(help="What may be reserved on the device: 16GiB. All of it, unless given.")
    ] = "",
    arguments: Annotated[
        str, typer.Option(help="Keyword arguments of the callable, as TOML: 'classes = 3, width = 16'.")
    ] = "",
    batch: Annotated[int, typer.Option(min=1, help="Images of a step.")] = 1,
    target: Annotated[
        str | None,
        typer.Option(
            help="Shape of one image's target: '' for a class. Unless given, a class for each position of the result."
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help="float32, or bfloat16 under autocast.")] = "float32",
    hardware: Annotated[str, typer.Option(help="h200, or here to measure this machine.")] = "h200",
    optimizer: Annotated[
        float, typer.Option(min=0, help="Numbers that it keeps for each of a parameter's: Adam 2, momentum 1.")
    ] = 1.0,
    channels_last: Annotated[bool, typer.Option(help="Weights and images with channels last.")] = False,
    output: Annotated[Path | None, typer.Option(help="The plan's TOML file, for mural train.")] = None,
) -> None:
    """Choose between keeping, computing again, sending to the host and streaming, on one device, with predictions.

    The step is rehearsed on tensors without memory, so no GPU is needed and any size will do.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision}: choose one of {', '.join(PRECISIONS)}")
    made = make_meta_model(config_of(model, arguments))
    made = made.to(memory_format=torch.channels_last) if channels_last else made  # type: ignore[call-overload]
    wanted = None if target is None else tuple(extents(target, "--target") or ()) if target else ()
    with Console(stderr=True).status("rehearsing steps …"):
        found = planned(
            made, extents(image, "--image") or (), batch=batch, memory=memory, hardware=hardware, target=wanted,
            precision="bfloat16" if precision == "bfloat16" else "float32", optimizer=optimizer,
        )  # fmt: skip
    typer.echo(f"{found}\n\n{found.explain()}")
    if output is not None:
        found.save(output)
        typer.echo(f"written to {output}")
