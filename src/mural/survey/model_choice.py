"""The model of a first run: its arguments from the data, and what the extents of images have to be multiples of."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mural.engine.alignment import graph_for
from mural.errors import ConfigError, MuralError
from mural.graph import Graph
from mural.survey.sampled_boxes import spread
from mural.train.config import ModelConfig
from mural.train.configured_samples import padded
from mural.train.factory import make_meta_model, named

CHANNELS = ("in_channels", "in_chans", "n_channels", "input_channels", "in_ch", "num_channels")
CLASSES = ("classes", "num_classes", "n_classes", "out_channels", "out_ch")
DIMS = ("dims", "spatial_dims", "ndim")
MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_SIZES = 4
"""Sizes of images that are tried."""
DEEPEST = 4
REFUSALS = (MuralError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)
"""What models raise for images that they do not take."""
Extents = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """What a model is for: images of some channels and sizes, and classes of positions (or of whole images)."""

    channels: int
    sizes: Sequence[Extents]
    classes: int
    whole_images: bool = False
    light: bool = True
    """Whether to choose a narrow model, for a machine without a GPU."""

    @property
    def dims(self) -> int:
        """The spatial dims of images."""
        return len(self.sizes[0])


@dataclass(frozen=True)
class ModelChoice:
    """A model with its arguments; `made` has no memory, and is None where it could not be made."""

    factory: str
    arguments: dict[str, Any]
    made: nn.Module | None = field(default=None, repr=False)
    multiple: int = 1
    stride: int = 1
    odd: tuple[str, ...] = ()


def chosen_model(task: Task, factory: str = "", given: Mapping[str, Any] | None = None) -> ModelChoice:
    """The model that a user names, or a default, with the arguments that the data tell, unless they are given."""
    where = factory or default_factory(task)
    parameters = parameters_of(where)
    arguments = filled(parameters, task, where) | ({} if factory else sizes_of(task)) | dict(given or {})
    missing = [p.name for p in parameters.values() if required(p) and p.name not in arguments]
    if missing:
        return ModelChoice(where, arguments, odd=(f"{where} needs {', '.join(missing)}: add to model.arguments",))
    try:
        made = make_meta_model(ModelConfig(where, arguments))
    except Exception as error:  # whatever someone else's model raises
        return ModelChoice(where, arguments, odd=(f"{where} cannot be made with these arguments: {one_line(error)}",))
    return fitted(ModelChoice(where, arguments, made), task)


def default_factory(task: Task) -> str:
    """A model of mural's own."""
    return f"mural.models:CNN{task.dims}D" if task.whole_images else "mural.models:UNet"


def sizes_of(task: Task) -> dict[str, int]:
    """Width and depth of a default model: two positions of the smallest image are left at its lowest resolution."""
    least = min(min(extents) for extents in task.sizes)
    depth = max(1, min(DEEPEST, least.bit_length() - 2))
    return {"width": 16 if task.light or task.dims == 3 else 32, "depth": depth}


def parameters_of(factory: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a callable; none where they are not known."""
    function = named(factory, "--model")
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def required(parameter: inspect.Parameter) -> bool:
    """Whether a parameter has to be given."""
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in several


def filled(parameters: Mapping[str, inspect.Parameter], task: Task, factory: str) -> dict[str, Any]:
    """The arguments that the data tell, under the names that a model has for them."""
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    known = [
        *parameters,
        *(["num_classes"] if takes_any else []),
        *(["in_chans"] if factory.startswith("timm") else []),
    ]
    values = ((DIMS, task.dims), (CHANNELS, task.channels), (CLASSES, task.classes))
    found = {next((name for name in names if name in known), ""): value for names, value in values}
    return {name: value for name, value in found.items() if name}


def fitted(choice: ModelChoice, task: Task) -> ModelChoice:
    """The choice with the multiple that images have to be padded to, found by trying it without memory."""
    why = ""
    for multiple in MULTIPLES:
        try:
            graphs = [graph_for_task(choice, task, padded(size, multiple)) for size in spread(task.sizes, MOST_SIZES)]
        except REFUSALS as error:
            why = why or one_line(error)
            continue
        stride = total_stride(choice, task, graphs[0])
        odd = tuple(undivided(choice.factory, task, stride, multiple))
        return ModelChoice(choice.factory, choice.arguments, choice.made, multiple, stride, odd)
    return ModelChoice(choice.factory, choice.arguments, odd=(f"{choice.factory} does not take these images: {why}",))


def graph_for_task(choice: ModelChoice, task: Task, extents: Extents) -> Graph:
    """The graph of the model for an image; ConfigError if its result is not what the loss compares with."""
    if choice.made is None:
        raise ConfigError(f"{choice.factory} was not made")
    graph = graph_for(choice.made, (task.channels, *extents))
    shapes = [value.shape[1:] for value in graph.outputs]
    wanted = (task.classes, *(() if task.whole_images else extents))
    if shapes != [wanted]:
        found = ", ".join("×".join(map(str, shape)) for shape in shapes)
        raise ConfigError(f"it gives {found} for an image, where {'×'.join(map(str, wanted))} is needed")
    return graph


def total_stride(choice: ModelChoice, task: Task, graph: Graph) -> int:
    """How many positions of the image stand for one of the lowest resolution."""
    with suppress(*REFUSALS):  # of an image that every stride divides, if the model takes more than one size
        graph = graph_for_task(choice, task, padded(task.sizes[0], MULTIPLES[-1]))
    image = graph.inputs[0].shape[2:]
    made = [shape[2:] for node in graph if node.kind == "windowed" for shape in node.output_shapes]
    ratios = [round(n / out) for shape in made for n, out in zip(image, shape, strict=False) if out > 1]
    return max(ratios, default=1)


def undivided(factory: str, task: Task, stride: int, multiple: int) -> list[str]:
    """What to know of sizes that the model's strides do not divide."""
    bad = [size for size in task.sizes if any(n % stride for n in size)]
    if not bad or (task.whole_images and multiple == 1):
        return []
    what = f"sizes such as {in_words(bad[0])} are no multiples of {stride}, the total stride of {factory}"
    return [f"{what}: " + (f"data.multiple = {multiple} pads them" if multiple > 1 else "it takes them as they are")]


def in_words(extents: Sequence[int]) -> str:
    """Extents of an image.

    >>> in_words((480, 640))
    '480 × 640'
    """
    return " × ".join(map(str, extents))


def one_line(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
