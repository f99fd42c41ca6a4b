"""Measured times and memory of the blocks of a graph on the device at hand, each kind of block once.

A block is a run of nodes: one node, what a call of a module made, a stage. It is run by itself on random tensors, so a
time does not depend on the model around it, and the same block in another model, or in the next session, is known.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mural.cost.cache import Cache, setting
from mural.cost.clock import Clock, clock_of
from mural.cost.replay import call, inputs_of, name_of, plain
from mural.cost.trial import Timing, trial
from mural.errors import PlanError
from mural.graph import Graph, Node
from mural.graph.differentiable import differentiable
from mural.graph.nodes import Place


@dataclass(frozen=True)
class MeasuredBlock:
    """Nodes `start` to `stop` - 1 of a graph."""

    graph: Graph
    start: int
    stop: int
    wanted: frozenset[Place]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Its nodes."""
        return self.graph.nodes[self.start : self.stop]

    @property
    def inputs(self) -> tuple[tuple[tuple[int, ...], torch.dtype, Place], ...]:
        """Shape, type and origin of the tensors that it reads and does not make, parameters included, each once."""
        inside = range(self.start, self.stop)
        found = {at: (shape, dtype, at) for node in self.nodes for shape, dtype, at in inputs_of(node)}
        return tuple(item for at, item in found.items() if at[0] not in inside)

    @property
    def outputs(self) -> tuple[Place, ...]:
        """What it makes that is read after it, or comes out of the model."""
        inside = range(self.start, self.stop)
        later = {at for node in self.graph.nodes[self.stop :] for at in node.reads}
        ends = later | {(output.source, output.pick) for output in self.graph.outputs}
        made = [(node.id, pick) for node in self.nodes for pick in range(len(node.output_shapes))]
        return tuple(at for at in made if at in ends and at[0] in inside)

    def signature(self) -> str:
        """The same for blocks that compute the same on the same shapes, wherever they stand."""
        names = {at: f"in{i}" for i, (_, _, at) in enumerate(self.inputs)}
        names |= {
            (node.id, pick): f"{i}.{pick}"
            for i, node in enumerate(self.nodes)
            for pick in range(len(node.output_shapes))
        }
        given = [[list(shape), name_of(dtype), at in self.wanted] for shape, dtype, at in self.inputs]
        calls = [[n.op, [names[at] for at in n.reads], plain(n.args), plain(n.kwargs)] for n in self.nodes]
        return json.dumps([given, calls, [names[at] for at in self.outputs]], separators=(",", ":"))

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Its outputs for these inputs."""
        values = {at: tensor for (_, _, at), tensor in zip(self.inputs, tensors, strict=True)}
        # A single call writes to new memory instead, so that it can be repeated; in a block of several, what
        # comes from outside is copied before it is written to.
        outside = set(values)
        for node in self.nodes:
            inplace = bool(node.writes) and not any(at in outside for at in node.reads[:1])
            made = call(node, [values[at] for at in node.reads], inplace=inplace)
            values |= {(node.id, pick): tensor for pick, tensor in enumerate(made)}
        return tuple(values[at] for at in self.outputs)


def block(graph: Graph, start: int, stop: int, wanted: Collection[Place] | None = None) -> MeasuredBlock:
    """The block of nodes `start` to `stop` - 1."""
    if not 0 <= start < stop <= len(graph.nodes):
        raise PlanError(f"nodes {start} to {stop} are not a block of a graph of {len(graph.nodes)} nodes")
    return MeasuredBlock(graph, start, stop, frozenset(differentiable(graph) if wanted is None else wanted))


def blocks(graph: Graph, level: int = 1, wanted: Collection[Place] | None = None) -> tuple[MeasuredBlock, ...]:
    """The blocks of a graph at a depth of nesting: 0 is the whole model, 1 its children; the last are single nodes."""
    edges = {0, len(graph.nodes)}
    depth: dict[int, int] = {0: 0}
    for index, inner in enumerate(graph.calls[1:], 1):
        depth[index] = depth[inner.parent or 0] + 1
        if depth[index] <= level and inner.start < inner.stop:
            edges |= {inner.start, inner.stop}
    found = frozenset(differentiable(graph) if wanted is None else wanted)
    ordered = sorted(edges)
    return tuple(MeasuredBlock(graph, a, b, found) for a, b in pairwise(ordered))


def measure(
    found: Sequence[MeasuredBlock], device: torch.device | str, *, cache: Cache | None = None
) -> tuple[Timing, ...]:
    """The times and memory of blocks on a device; those of a kind that was measured before are looked up.

    On a CPU, memory is the growth of this process's resident size: measure in a process that does nothing else.
    """
    cache = Cache(setting(device)) if cache is None else cache
    clock: Clock | None = None
    answers: list[Timing] = []
    for each in found:
        name = each.signature()
        timing = cache.get(name)
        if timing is None:
            clock = clock or clock_of(device)
            timing = measure_block(each, clock)
            cache.add({name: timing})
        answers.append(timing)
    return tuple(answers)


def measure_block(each: MeasuredBlock, clock: Clock) -> Timing:
    """The times and memory of one block, on random tensors."""
    tensors: list[Tensor] = []
    for shape, dtype, at in each.inputs:
        if dtype.is_floating_point:
            tensor = torch.rand(shape, device=clock.device).to(dtype)
        else:
            tensor = torch.zeros(shape, dtype=dtype, device=clock.device)
        tensors.append(tensor.requires_grad_(at in each.wanted))
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    names = {value.name for value in each.graph.parameters}
    fresh = [
        t for t, (_, _, at) in zip(tensors, each.inputs, strict=True) if t.is_floating_point() and at[0] not in names
    ]
    return trial(lambda: each.run(tensors), leaves, fresh, clock)
