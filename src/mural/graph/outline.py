"""The outline of a graph: what all its drawings show. Boxes nested as modules call each other, down to layers.

A layer is one node of the graph; a module that makes a single call is that layer, under the module's name and kind.
Parameters are no boxes: they are counted where they are used. Values at the model's border are boxes of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, get_args

from torch.utils import _pytree as pytree

from mural.errors import PlanError
from mural.graph.nodes import Graph, Node, Shape, Source
from mural.graph.rows import Net, rows
from mural.graph.sites import At, Call

Level = Literal["module", "block", "layer"]
LEGIBLE = 28
"""How many boxes are looked at without searching: a page opens with no more, if it can."""


@dataclass(frozen=True)
class Box:
    """A call of a module with what is inside, a layer, or an input or output of the model.

    `start` and `stop` are the nodes inside. `parent` is None for the model itself, the first of all boxes.
    """

    id: int
    parent: int | None
    role: Literal["block", "layer", "input", "output"]
    name: str
    site: str
    kind: str
    shapes: tuple[Shape, ...]
    start: int
    stop: int
    children: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outline:
    """The boxes in forward order, each before those inside it, and who reads whom among layers, inputs and outputs."""

    graph: Graph
    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]
    costs: tuple[int, ...]
    """The FLOPs of each node."""

    @cached_property
    def nets(self) -> Mapping[int, tuple[Net, ...]]:
        """The values that flow inside each block, by its id.

        An edge between layers passes a port of each block that it leaves or enters:

            ┌ A ────┐   ┌ B ────┐     in A: source a, leaves     in the block around: source A, target B
            │ a ────○───○─── b  │     in B: from outside, target b
            └───────┘   └───────┘
        """
        found: dict[int, dict[int, tuple[int | None, list[int], bool]]] = {}
        for origin, reader in self.edges:
            above, below = self.around(origin), self.around(reader)
            shared = next(i for i, (a, b) in enumerate(zip(above, below, strict=False)) if a != b)
            for depth in range(shared - 1, len(above) - 1):
                found.setdefault(above[depth], {}).setdefault(origin, (above[depth + 1], [], False))
            for depth in range(shared - 1, len(below) - 1):
                net = found.setdefault(below[depth], {}).setdefault(origin, (None, [], False))
                if below[depth + 1] not in net[1]:
                    net[1].append(below[depth + 1])
            for depth in range(shared, len(above) - 1):
                source, targets, _ = found[above[depth]][origin]
                found[above[depth]][origin] = (source, targets, True)
        return {
            block: tuple(Net(origin, source, tuple(sorted(to)), leaves) for origin, (source, to, leaves) in nets.items())
            for block, nets in found.items()
        }

    def around(self, box: int) -> list[int]:
        """The boxes around one, the model first, itself last."""
        line = [box]
        while (parent := self.boxes[line[-1]].parent) is not None:
            line.append(parent)
        return line[::-1]

    def rows(self, block: int) -> list[list[int]]:
        """The boxes inside a block, in rows."""
        return rows(self.boxes[block].children, self.nets.get(block, ()))

    def blocks(self) -> tuple[Box, ...]:
        """The boxes that can be opened."""
        return tuple(box for box in self.boxes if box.children)

    def level(self, block: Box) -> Level:
        """The coarsest level at which a block is open.

        "module": the model alone. "block": what holds blocks. "layer": all.
        """
        if block.parent is None:
            return "module"
        return "block" if any(self.boxes[child].children for child in block.children) else "layer"

    def opened(self, level: Level | None = None) -> frozenset[int]:
        """The blocks that are open at a level; by default one depth of blocks after another while that is legible."""
        if level is not None:
            levels = get_args(Level)
            if level not in levels:
                raise PlanError(f'level = {level!r} is no level of a graph: take "module", "block" or "layer"')
            deep = levels.index(level)
            return frozenset(block.id for block in self.blocks() if levels.index(self.level(block)) <= deep)
        opened: set[int] = set()
        front = [self.boxes[0]]
        seen = 0
        while front and (not opened or seen + sum(len(block.children) for block in front) <= LEGIBLE):
            seen += sum(len(block.children) for block in front)
            opened.update(block.id for block in front)
            front = [self.boxes[child] for block in front for child in block.children if self.boxes[child].children]
        return frozenset(opened)

    def shown(self, opened: Iterable[int]) -> list[Box]:
        """The boxes that are seen when these blocks are open, in forward order."""
        open_ = set(opened)
        return [box for box in self.boxes if all(parent in open_ for parent in self.around(box.id)[:-1])]

    def shown_edges(self, opened: Iterable[int]) -> list[tuple[int, int]]:
        """Who reads whom among the boxes that are seen and closed."""
        open_ = set(opened)

        def seen(box: int) -> int:
            return next(around for around in self.around(box) if around not in open_)

        ends = dict.fromkeys((seen(origin), seen(reader)) for origin, reader in self.edges)
        return [(origin, reader) for origin, reader in ends if origin != reader]

    def parameters(self, start: int, stop: int) -> int:
        """How many numbers are trained in the nodes from `start` to `stop`; what is used twice counts once."""
        sizes = self._sizes
        used = {name for node in self.graph.nodes[start:stop] for name in node.inputs if name in sizes}
        return sum(sizes[name] for name in used)

    def flops(self, start: int, stop: int) -> int:
        """The FLOPs of the nodes from `start` to `stop`."""
        return sum(self.costs[start:stop])

    @cached_property
    def _sizes(self) -> Mapping[Source, int]:
        return {value.name: prod(value.shape) for value in self.graph.parameters if value.role == "parameter"}


def outline(graph: Graph) -> Outline:
    """The outline of a graph."""
    return Growing(graph).finished()


class Growing:
    """The boxes of a graph while they are collected, in forward order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.boxes: list[Box] = []
        self.inside: dict[int, list[int]] = {}
        self.of_source: dict[Source, int] = {}
        """The box of each layer and input."""
        self.counts = [0] * len(graph.calls)
        for node in graph.nodes:
            for call in self.calls_around(node):
                self.counts[call] += 1

    def calls_around(self, node: Node) -> list[int]:
        """The calls that a node happened in, the model's first."""
        line: list[int] = []
        call: int | None = node.call
        while call is not None:
            line.append(call)
            call = self.graph.calls[call].parent
        return line[::-1]

    def add(self, parent: int | None, **what: Any) -> int:
        """Put a box into another."""
        number = len(self.boxes)
        self.boxes.append(Box(id=number, parent=parent, **what))
        if parent is not None:
            self.inside.setdefault(parent, []).append(number)
        return number

    def finished(self) -> Outline:
        """The outline."""
        graph = self.graph
        of_call: dict[int, int] = {0: self.add_block(0, None, 0)}
        for value in graph.inputs:
            box = self.add(0, role="input", name=value.name, site=value.name, kind="", shapes=(value.shape,), start=0, stop=0)
            self.of_source[value.name] = box
        for node in graph.nodes:
            parent = 0
            for call in self.calls_around(node)[1:]:
                if self.counts[call] > 1:
                    if call not in of_call:
                        of_call[call] = self.add_block(call, parent, node.id)
                    parent = of_call[call]
            self.of_source[node.id] = self.add_layer(node, parent)
        edges = dict.fromkeys((self.of_source[s], self.of_source[n.id]) for n in graph.nodes for s in n.needs if s in self.of_source)
        end = len(graph.nodes)
        for value in graph.outputs:
            box = self.add(
                0, role="output", name=value.name, site=value.name, kind="", shapes=(value.shape,), start=end, stop=end
            )
            made = (value.source, *value.after)
            edges.update(dict.fromkeys((self.of_source[source], box) for source in made if source in self.of_source))
        boxes = tuple(
            Box(**{**vars(box), "children": tuple(self.inside.get(box.id, ()))}) for box in self.boxes
        )
        return Outline(graph, boxes, tuple(edges), (0,) * len(graph))

    def add_block(self, index: int, parent: int | None, start: int) -> int:
        """The box of a call of a module that does more than one thing."""
        call = self.graph.calls[index]
        return self.add(
            parent,
            role="block",
            name=self.short(call, parent) if call.module else call.kind,
            site=call.label,
            kind=call.kind if call.module else "",
            shapes=tuple(self.shape_of(at) for at in pytree.tree_leaves(call.outputs) if isinstance(at, At)),
            start=start,
            stop=start + self.counts[index],
        )

    def add_layer(self, node: Node, parent: int) -> int:
        """The box of a node, under the name of the module that does nothing else."""
        line = [self.graph.calls[call] for call in self.calls_around(node)[1:] if self.counts[call] == 1]
        return self.add(
            parent,
            role="layer",
            name=self.short(line[-1], parent) if line else node.op.removeprefix("__").removesuffix("__"),
            site=node.site,
            kind=line[-1].kind if line else "",
            shapes=node.output_shapes,
            start=node.id,
            stop=node.id + 1,
        )

    def short(self, call: Call, parent: int | None) -> str:
        """The name of a call inside its box: `conv` for `head.conv` in `head`."""
        around = self.boxes[parent].site.partition("@")[0] if parent else ""
        return call.label.removeprefix(f"{around}.") if around else call.label

    def shape_of(self, at: At) -> Shape:
        """The shape of the tensor that stands there."""
        if isinstance(at.source, int):
            return self.graph.nodes[at.source].output_shapes[at.pick]
        values = (*self.graph.inputs, *self.graph.parameters)
        return next((value.shape for value in values if value.name == at.source), ())

