"""The first layer whose output is infinite or not a number, found by running the step again and looking at each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from mural.comm.failure.agree import any_rank
from mural.data.loading.sample_source import SampleSource
from mural.engine import Parallel
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.train.configured_loss import ignored_label
from mural.train.meters import gathered

TURN = 2**32
"""More calls than a step has."""
FINITE = "every layer is finite by itself: the loss, or a sum of gradients, is not"
UNSEEN = "images and weights are finite; layers are not seen one by one when an image is streamed"


class Finder:
    """Watches the leaves of a model for one step; `seen` are those that gave bad values, in the order of the step.

    Where ranks hold different stages, an output of an earlier stage comes first, and so does a gradient of a later one.
    """

    def __init__(self, model: nn.Module, stage: int = 0, stages: int = 1):
        self.model, self.stage, self.last = model, stage, stages - 1
        self.seen: list[tuple[int, str]] = []
        self.clock = 0

    def __enter__(self) -> Finder:
        self.hooks = ExitStack()
        for name, module in self.model.named_modules():
            if not any(True for _ in module.children()):
                label = f"{name or 'the model'} ({type(module).__name__})"
                self.hooks.callback(module.register_forward_hook(self.hook(label)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    def hook(self, label: str) -> Callable[..., None]:
        """What looks at a layer's output, and at the gradient that reaches it."""

        def look(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in tensors_of(output):
                if tensor.is_meta:  # the model is captured, as for a streamed step
                    continue
                self.look(tensor, f"the output of {label}", self.stage)
                if tensor.requires_grad:
                    words, turn = f"the gradient at the output of {label}", 2 * self.last + 1 - self.stage
                    tensor.register_hook(partial(self.look, where=words, turn=turn))

        return look

    def look(self, tensor: Tensor, where: str, turn: int) -> None:
        """Note where a tensor is bad; the clocks of a stage's ranks count the same calls."""
        self.clock += 1
        if tensor.numel() and not bool(tensor.isfinite().all()):
            self.seen.append((turn * TURN + self.clock, where))


def tensors_of(value: Any, floating: bool = True) -> Iterator[Tensor]:
    """The plain tensors of a layer's result, those that are floating or the others."""
    if isinstance(value, ShardedTensor):
        value = value.carrier
    if isinstance(value, Tensor):
        if value.is_floating_point() == floating:
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part, floating)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part, floating)


def parts_of(image: Any, mesh: Mesh, floating: bool = True) -> Iterator[Tensor]:
    """What this rank has of a batch's images or masks; of sources, its share of their windows."""
    if not isinstance(image, list):
        yield from tensors_of(image, floating)
        return
    sources = cast("list[SampleSource]", image)
    windows = [(source, window) for source in sources for window in source.windows()]
    yield from (source.read(window) for source, window in windows[mesh.rank :: mesh.world])


def first_bad(pm: Parallel, image: Any, target: Any, mesh: Mesh) -> str:
    """Where bad values came from first, on any rank, in words. Collective; gradients are lost."""
    found = earliest(mesh, *before_the_step(pm, image, mesh))
    if found:
        return found
    if nothing_counts(pm, target, mesh):
        return (
            f"no position counts: all masks of this batch hold {ignored_label(pm.loss)} alone, which the loss ignores"
        )
    pm.calls -= 1  # the same random numbers again
    pm.zero_grad()
    with Finder(pm.module, pm.first_stage, pm.plan.stages) as finder:
        pm.step(image, target, reduce=False)
    pm.zero_grad()
    moment, where = finder.seen[0] if finder.seen else (inf, "")
    seen = any_rank(mesh, finder.clock > 0)[0]
    return earliest(mesh, moment, where) or (FINITE if seen else UNSEEN)


def nothing_counts(pm: Parallel, target: Any, mesh: Mesh) -> bool:
    """Whether every label of a batch is the one that the loss ignores. Collective."""
    ignored = ignored_label(pm.loss)
    counted = [bool((part != ignored).any()) for part in parts_of(target, mesh, floating=False) if part.numel()]
    there, some = any_rank(mesh, bool(counted), any(counted))
    return ignored is not None and there and not some


def before_the_step(pm: Parallel, image: Any, mesh: Mesh) -> tuple[float, str]:
    """Whether what goes into the step is bad already: a moment (infinite: never), and what."""
    for name, weights in pm.named_parameters():
        if not bool(weights.isfinite().all()):
            return 0, f"the weights {name}"
    good = all(bool(t.isfinite().all()) for t in parts_of(image, mesh) if t.numel())
    return (inf, "") if good else (1, "the image")


def earliest(mesh: Mesh, moment: float, where: str) -> str:
    """What the rank with the earliest moment says; nothing if no rank has one. Collective."""
    rows = [row[0] for row in gathered(mesh, [float(moment)])]
    if min(rows) == inf:
        return ""
    told: list[Any] = [where] * mesh.world
    if mesh.world > 1:
        dist.all_gather_object(told, where, group=mesh.transport.group)
    rank = rows.index(min(rows))
    return f"{told[rank]} was the first that is not finite (seen on rank {rank})"
