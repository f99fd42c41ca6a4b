"""Edges: the values that go from one stage to others, straight from the stage that makes them to each that reads them.

stage 0          stage 1        stage 2
a ─────────────────────────────── reads a         Edge(a, producer 0, consumers (1, 2))
└──────────────── reads a
                  b ───────────── reads b         Edge(b, producer 1, consumers (2,))
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mural.errors import PlanError
from mural.graph.liveness import Result, flows
from mural.graph.nodes import Graph, Shape


@dataclass(frozen=True)
class CrossingValue:
    """A value that a stage makes and later stages read; `gradient` if its gradient comes back.

    The value is that at the end of the producer's forward pass: calls of the producer may still write to its memory.
    """

    value: Result
    producer: int
    consumers: tuple[int, ...]
    gradient: bool
    bytes: int
    shape: Shape
    dtype: torch.dtype


def edges(graph: Graph, starts: Sequence[int]) -> tuple[CrossingValue, ...]:
    """The edges between the stages that begin at these nodes, in the order in which their values are made.

    The first stage begins at node 0, which may be left out. What the model returns goes to the last stage.
    """
    begins = stage_starts(graph, starts)
    last = len(begins) - 1
    found: list[CrossingValue] = []
    for flow in flows(graph):
        producer = bisect_right(begins, flow.value[0]) - 1
        stages = {bisect_right(begins, reader) - 1 for reader in flow.readers}
        consumers = sorted((stages | {last} if flow.returned else stages) - {producer})
        if consumers:
            edge = CrossingValue(
                flow.value, producer, tuple(consumers), flow.gradient, flow.bytes, flow.shape, flow.dtype
            )
            found.append(edge)
    return tuple(found)


def stage_starts(graph: Graph, starts: Sequence[int]) -> list[int]:
    """Where all stages begin, node 0 first; raises PlanError for a stage that would be empty."""
    begins = [*([] if list(starts[:1]) == [0] else [0]), *starts]
    for before, after in zip(begins, [*begins[1:], len(graph)], strict=True):
        if before >= after:
            raise PlanError(
                f"stages that begin at the nodes {begins} of {len(graph)} leave one without calls: "
                f"give rising node ids between 1 and {len(graph) - 1}"
            )
    return begins
