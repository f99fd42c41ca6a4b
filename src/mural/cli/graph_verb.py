"""`mural graph`: what a model calls, as a page, as DOT or as a table, without running it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from mural.cli.app import app
from mural.cli.convert_verb import extents
from mural.errors import ConfigError, DataError
from mural.graph.blocks import Level
from mural.model_graph import capture
from mural.plans import Plan
from mural.train.config import Config, ModelConfig
from mural.train.configured_samples import datasets, image_shape
from mural.train.factory import make_meta_model
from mural.train.failing_code import naming

Model = Annotated[
    str, typer.Argument(help="package.module:callable or file.py:callable that makes the model, or a run's TOML file.")
]


@app.command()
def graph(
    model: Model,
    arguments: Annotated[
        str, typer.Option(help="Keyword arguments of the callable, as TOML: 'classes = 3, width = 16'.")
    ] = "",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of the input: 1,3,1024,1024. Give it again for each further input. By default that of the "
            "run's images."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="What to write: NAME.html, NAME.dot or NAME.txt.")] = None,
    level: Annotated[Level | None, typer.Option(help="How far blocks are open.")] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Colours for this many stages of as many layers each.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan's TOML file, for the colours of its stages.")] = None,
) -> None:
    """Draw what a model calls for an input of some shape; nothing is computed, so any size will do.

    Without --output, a table is printed.
    """
    if stages is not None and plan is not None:
        raise typer.BadParameter("--stages and --plan both say where stages begin: give one of them")
    shapes = [each for text in shape or [] if (each := extents(text, "--shape"))] or shapes_of(model)
    made = make_meta_model(config_of(model, arguments))
    with naming("the model", f"inputs of shape {', '.join(map(str, shapes))}", made):
        captured = capture(made, shapes)
    drawn = captured.draw(output, stages if plan is None else Plan.load(plan), level)
    typer.echo(drawn if output is None else f"{output}: {captured!r}", nl=output is not None)


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """The shapes of a run's batches, one for each domain; without a run, or if it names no images, those of a photo."""
    config = Config.load(Path(model)) if model.endswith(".toml") else Config()
    data = config.data
    if data.images is data.table is data.dataset is None:
        return [(1, 3, 1024, 1024)]
    try:
        return [(data.batch, *image_shape(config, split)) for split in datasets(config).values()]
    except DataError as error:
        raise DataError(f"{error}. To draw the model without its images, give --shape 1,3,1024,1024") from error


def config_of(model: str, arguments: str) -> ModelConfig:
    """What describes the model: a run's file, or a callable with its arguments."""
    given = arguments_of(arguments)
    if not model.endswith(".toml"):
        return ModelConfig(factory=model, arguments=given)
    found = Config.load(Path(model)).model
    return ModelConfig(factory=found.factory, arguments={**found.arguments, **given}, dtype=found.dtype)


def arguments_of(text: str) -> dict[str, Any]:
    """Keyword arguments, written as in a TOML file.

    >>> arguments_of("classes = 3, blocks = [2, 3]")
    {'classes': 3, 'blocks': [2, 3]}
    """
    inside = text.strip().removeprefix("{").removesuffix("}")
    try:
        return tomllib.loads(f"x = {{{inside}}}")["x"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"--arguments {text!r} cannot be read as TOML ({error}): write them as in 'classes = 3, name = \"a\"'"
        ) from error
