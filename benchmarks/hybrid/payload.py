"""What travels for a layer that is split by channels, and for its gradients where it is not: sizes and formulas.

Document `004` counts, for N nodes: data parallelism sends 2 N messages of the model's size, model parallelism 2 N
messages for each layer, of 2 N times the data in all. «Data» are the values between layers for the images of a step;
its «up to 35 nodes» for LeNet-5 is 61,706 parameters over 1,790 values, with one image for each node: what counts is
the number of images in a step, not that of nodes.

Here a layer of a group of K ranks with B images sends, forward and backward together,

    split by output   2 B (K - 1) (inputs + outputs / K)         every image's inputs to all, its outputs home
    split by input    2 B (K - 1) (inputs / K + outputs)         the parts of its inputs to all, partial outputs home
    not split         2 (K - 1) parameters                       a ring's mean of the gradients

so that splitting a layer by output pays while B (inputs + outputs / K) is less than its parameters. In turns, inputs
are fetched again for backward instead of being kept: half as much again for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """A layer with parameters of its own: their number, and the values that it takes and makes for one image.

    `kept` is what the next layer takes: behind a pool, less than what this one makes.
    """

    name: str
    parameters: int
    inputs: int
    outputs: int
    kept: int


def sizes(model: nn.Module, image: Sequence[int]) -> list[Size]:
    """The sizes of a model's layers for an image (C, H, W), in the order of their first calls; nothing is computed.

    >>> from mural.models import LeNet5
    >>> [(size.kept, size.parameters) for size in sizes(LeNet5(), (1, 32, 32))]
    [(1176, 156), (400, 2416), (120, 48120), (84, 10164), (10, 850)]
    """
    bare = deepcopy(model).to("meta")
    seen: dict[str, tuple[int, int, int]] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        if name not in seen and args and isinstance(args[0], Tensor) and isinstance(made, Tensor):
            held = sum(p.numel() for p in module.parameters(recurse=False))
            seen[name] = (held, args[0].numel(), made.numel())

    for name, module in bare.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(lambda m, args, made, name=name: note(name, m, args, made))
    dtype = next((p.dtype for p in bare.parameters()), torch.float32)
    with torch.no_grad():
        bare(torch.empty(1, *image, device="meta", dtype=dtype))
    found = list(seen.items())
    following = [inputs for _, (_, inputs, _) in found[1:]]
    kept = [*following, *(outputs for _, (_, _, outputs) in found[-1:])]
    return [Size(name, *counts, k) for (name, counts), k in zip(found, kept, strict=True)]


def crossover(layers: Sequence[Size]) -> float:
    """The images in a step up to which the document's model parallelism sends less than its data parallelism.

    >>> from mural.models import LeNet5
    >>> round(crossover(sizes(LeNet5(), (1, 32, 32))), 1)
    34.5
    """
    return sum(layer.parameters for layer in layers) / sum(layer.kept for layer in layers)


@dataclass(frozen=True)
class Formula:
    """Messages and values of one step over all nodes, by the formulas of document `004`."""

    messages: int
    values: int


def data_parallel(layers: Sequence[Size], nodes: int) -> Formula:
    """Every node's gradients to one, and the model back: 2 N messages of the model's size."""
    return Formula(2 * nodes, 2 * nodes * sum(layer.parameters for layer in layers))


def model_parallel(layers: Sequence[Size], nodes: int, images: int) -> Formula:
    """The data of every layer reduced and broadcast: 2 N messages a layer, 2 N times the data of all images."""
    return Formula(2 * nodes * len(layers), 2 * nodes * images * sum(layer.kept for layer in layers))


def split_values(size: Size, images: int, ranks: int, by: str = "output", *, turns: bool = False) -> float:
    """The values that a group of ranks sends for a split layer in one step, forward and backward; in `turns` or not.

    Exact where the images and the channels divide evenly. The model's first layer sends no gradient of its input.

    >>> split_values(Size("fc", 48_120, 400, 120, 120), images=8, ranks=2)
    7360.0
    >>> split_values(Size("fc", 48_120, 400, 120, 120), images=8, ranks=2, turns=True)
    10560.0
    """
    inputs, outputs = (size.inputs, size.outputs / ranks) if by == "output" else (size.inputs / ranks, size.outputs)
    return images * (ranks - 1) * ((3 if turns else 2) * inputs + 2 * outputs)


def gradient_values(size: Size, ranks: int) -> int:
    """The values that a ring of ranks sends to average the gradients of a layer that all of them hold."""
    return 2 * (ranks - 1) * size.parameters


def pays(size: Size, images: int, ranks: int, by: str = "output") -> bool:
    """Whether a layer that is split sends less than one whose gradients are averaged.

    >>> fc, conv = Size("fc", 48_120, 400, 120, 120), Size("conv", 2_416, 1_176, 1_600, 400)
    >>> pays(fc, images=8, ranks=2), pays(conv, images=8, ranks=2)
    (True, False)
    """
    return split_values(size, images, ranks, by) < gradient_values(size, ranks)
