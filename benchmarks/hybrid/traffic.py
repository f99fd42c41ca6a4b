"""What one step sends, layer by layer: messages and values, counted where they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mural.channel.layer import KIND
from mural.comm.failure.agree import gather
from mural.engine.inputs import Image
from mural.engine.parallel import Parallel


@dataclass(frozen=True)
class LayerTraffic:
    """What all ranks together sent for one layer in a step.

    `messages` and `bytes` are those of its split channels; `gradients` are the values that ranks handed to the averages
    of its parameters, where several ranks hold them.
    """

    name: str
    messages: int
    bytes: int
    gradients: int


def traffic(pm: Parallel, image: Image, target: Any) -> list[LayerTraffic]:
    """The messages and bytes of one step, layer by layer, and last "" for all that no layer owns. Collective.

    The step is a real one: gradients are added to `.grad`. Halos, norms and losses belong to no layer here.
    """
    with pm.mesh.transport.record() as record:
        pm.step(image, target)
    names = [name for name, module in pm.plain.named_modules() if module._parameters]
    sent: dict[str, tuple[int, int]] = {}
    for name, counts in record.named.items():
        kind, _, layer = name.partition(": ")
        layer = layer if kind == KIND else ""
        before = sent.get(layer, (0, 0))
        sent[layer] = (before[0] + counts[0], before[1] + counts[1])
    every = gather(pm.world_mesh, (sent, handed(pm)), "what a step sent").values()
    return [added(name, list(every)) for name in (*names, "")]


def handed(pm: Parallel) -> dict[str, int]:
    """The values of this rank's gradients that are averaged with others', by layer."""
    found: dict[str, int] = {}
    held = {id(p) for each in pm.reducer.sets if each.group is not None for _, p in each.named}
    for name, p in pm.named_parameters():
        if id(p) in held and p.grad is not None:
            layer = name.rpartition(".")[0]
            found[layer] = found.get(layer, 0) + p.numel()
    return found


def added(name: str, ranks: list[tuple[Mapping[str, tuple[int, int]], Mapping[str, int]]]) -> LayerTraffic:
    """One layer's traffic over all ranks."""
    counts = [sent.get(name, (0, 0)) for sent, _ in ranks]
    gradients = sum(handed.get(name, 0) for _, handed in ranks)
    return LayerTraffic(name, sum(m for m, _ in counts), sum(b for _, b in counts), gradients)


def value_bytes(pm: Parallel) -> int:
    """The width of the values that split layers exchange."""
    if pm.plan.precision == "bfloat16":
        return torch.bfloat16.itemsize
    return next((p.element_size() for p in pm.parameters()), torch.float32.itemsize)
