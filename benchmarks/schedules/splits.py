"""Where to cut: stages balanced by layers, fitted time, measured time or memory, at three levels of blocks.

    MODEL/STAGES/LEVEL/BY    resnet50/8/block/time

Document 001 assumes that «analytical models to estimate execution time» split a model better. The naive split, equal
numbers of layers, is what they are compared with; «measured» has the seconds of every layer on the machine at hand
instead of fitted ones, as good as any prediction of layers can be. Here cuts are chosen; `split_steps.py` runs them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Any

import torch
from harness.vision import narrowed, torchvision
from problems import MICROBATCHES
from torch import Tensor, nn

import mural
from mural import cost
from mural.engine.stage_starts import under_way
from mural.errors import PlanError
from mural.graph import Graph
from mural.graph.blocks import LEVELS
from mural.models import UNet
from mural.models.amoebanet import amoebanetd
from mural.pipeline.partition import Partition, partition
from mural.plans import Plan

STAGES, BY = (8, 4, 2), ("layers", "time", "measured", "memory")
OBJECTIVES = {"layers": "layers", "time": "time", "measured": "time", "memory": "memory"}
CLASSES = 10
PLAN = Plan(schedule="1f1b", microbatches=MICROBATCHES, batchnorm="micro")
PREPARING, STARTING, DISTINCT = 100.0, 12.0, 0.75
"""Seconds to measure and cut all models, and to start ranks; the share of the cells whose cuts no other cell has."""


@dataclass(frozen=True)
class Net:
    """A model and its images; a micro-batch is one of them."""

    build: Callable[[], nn.Module]
    side: int
    words: str
    seconds: float = 0.02
    """Of an image on one core, roughly."""
    setup: float = 1.0
    """Seconds until it is divided and has taken its first steps, beyond these steps, roughly."""
    per_pixel: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image."""
        return (3, self.side, self.side)

    def graph(self) -> Graph:
        """The graph of a micro-batch."""
        with torch.device("meta"):
            model = self.build()
        return mural.capture(model, (1, *self.shape))

    def batch(self, images: int) -> tuple[Tensor, Tensor]:
        """Images and their labels, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        extents = self.shape[1:] if self.per_pixel else ()
        labels = torch.randint(2 if self.per_pixel else CLASSES, (images, *extents), generator=generator)
        return torch.randn(images, *self.shape, generator=generator), labels


NETS = {
    "unet": Net(lambda: UNet(width=16, depth=4), 224, "U-Net of width 16, 224²", 0.2, 1.0, per_pixel=True),
    "resnet50": Net(lambda: torchvision.models.resnet50(num_classes=CLASSES), 160, "ResNet-50, 160²", 0.21, 1.5),
    "densenet121": Net(
        lambda: torchvision.models.densenet121(num_classes=CLASSES), 160, "DenseNet-121, 160²", 0.17, 3.0
    ),
    "amoebanet18": Net(
        lambda: amoebanetd(18, filters=96, classes=CLASSES), 160, "AmoebaNet-18, 96 filters, 160²", 0.22, 5.0
    ),
}
TOYS = {
    "unet": Net(lambda: UNet(width=4, depth=2), 32, "toy U-Net", per_pixel=True),
    "resnet50": Net(lambda: narrowed("resnet18", 8, classes=CLASSES), 64, "toy ResNet-18"),
    "amoebanet18": Net(lambda: amoebanetd(3, filters=8, classes=CLASSES), 64, "toy AmoebaNet-3"),
}


def nets(quick: bool) -> Mapping[str, Net]:
    """The models, or their toys."""
    return TOYS if quick else NETS


@dataclass(frozen=True)
class Cell:
    """One way to cut one model."""

    model: str
    stages: int
    level: str
    by: str

    @property
    def name(self) -> str:
        """The name.

        >>> Cell("unet", 8, "block", "time").name
        'unet/8/block/time'
        """
        return f"{self.model}/{self.stages}/{self.level}/{self.by}"


def cells(quick: bool) -> list[Cell]:
    """All of them; the finest level first, where cuts differ most."""
    levels = LEVELS[::-1]
    stages = (2,) if quick else STAGES
    return [Cell(m, n, level, by) for n in stages for level in levels for m in nets(quick) for by in BY]


# -- cuts --------------------------------------------------------------------------------------------------------------


def prepared(model: str, wanted: Sequence[Cell], quick: bool) -> dict[str, Any]:
    """In a process of its own: the seconds of every node, measured alone on one thread, and the cuts of all cells."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    graph = nets(quick)[model].graph()
    measured = node_seconds(graph)
    fitted = [each.forward + each.backward for each in cost.seconds(graph, "cpu")]
    seconds = {"fitted": fitted, "measured": [sum(each) for each in measured]}
    found = {cell.name: cut(cell, graph, seconds) for cell in wanted}
    return {"nodes": measured, "cuts": found, "took": time.perf_counter() - begin}


def node_seconds(graph: Graph) -> list[tuple[float, float]]:
    """Forward and backward of each node on this machine; nodes that compute the same are measured once."""
    with tempfile.TemporaryDirectory(prefix="mural-splits-") as folder:
        cache = cost.Cache("the layers of one model", Path(folder))
        alone = [cost.block(graph, node.id, node.id + 1) for node in graph.nodes]
        return [(found.forward, found.backward) for found in cost.measure(alone, "cpu", cache=cache)]


def cut(cell: Cell, graph: Graph, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The cuts of a cell, the largest share of a stage in the time of all by either seconds, and its memory."""
    plan = replace(PLAN, stage=cell.stages)
    given = seconds["measured" if cell.by == "measured" else "fitted"]
    about: Any = (cell.stages, OBJECTIVES[cell.by], cell.level)
    try:
        found = partition(graph, *about, microbatches=under_way(plan), seconds=given)
    except PlanError as error:
        return {"impossible": str(error)}
    shares = {name: largest_share(found, graph, each) for name, each in seconds.items()}
    return {"names": list(found.names), "shares": shares, "memory": found.memory}


def largest_share(found: Partition, graph: Graph, seconds: Sequence[float]) -> float:
    """What part of all time the slowest stage takes; 1 / stages is perfect balance."""
    bounds = [0, *found.cuts, len(graph)]
    return max(fsum(seconds[a:b]) for a, b in pairwise(bounds)) / fsum(seconds)


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Some cuts to be run, and the cells that ask for them."""

    model: str
    stages: int
    names: tuple[str, ...]
    cells: tuple[str, ...]

    @property
    def name(self) -> str:
        """That of the first cell that asks for these cuts."""
        return self.cells[0]

    @property
    def ranks(self) -> int:
        """One for each stage."""
        return self.stages

    @property
    def about(self) -> dict[str, Any]:
        """What a record of it begins with."""
        about = {"kind": "split", "name": self.name, "model": self.model, "stages": self.stages}
        return about | {"names": list(self.names), "cells": list(self.cells)}


def splits(wanted: Sequence[Cell], cuts: Mapping[str, Mapping[str, Any]]) -> list[Split]:
    """What is to be run for some cells: equal cuts once, those that are impossible not at all."""
    asked: dict[tuple[str, int, tuple[str, ...]], list[str]] = {}
    for cell in wanted:
        answer = cuts[cell.name]
        if "names" in answer:
            asked.setdefault((cell.model, cell.stages, tuple(answer["names"])), []).append(cell.name)
    return [Split(*about, tuple(names)) for about, names in asked.items()]


def expected(cell: Cell, rounds: int, seconds: float) -> float:
    """Seconds of a cell on a machine with a core for each rank, roughly; cells of the same cuts share them."""
    net = NETS[cell.model]
    step = net.seconds * (MICROBATCHES + cell.stages - 1) / cell.stages * 1.3
    return DISTINCT * (net.setup + step * (2 + max(1, min(rounds, seconds / step))))
