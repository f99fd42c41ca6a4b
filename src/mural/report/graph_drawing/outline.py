"""The outline of a graph: what all its drawings show. Boxes nested as modules call each other, down to layers.

A layer is a module that calls no other, or a call of a function outside of these; where a module makes several
calls of functions, these are boxes inside the layer. Parameters are not boxes: they are counted where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Literal

from torch.utils import _pytree as pytree

from mural.graph.blocks import LEVELS, Level, check_level
from mural.graph.nesting import NestedSpan, Nesting
from mural.graph.nodes import Graph, Node, Shape, Source
from mural.graph.sites import At
from mural.graph.work_and_depth import node_costs
from mural.report.graph_drawing.box_rows import Net, rows

Role = Literal["block", "list", "layer", "operation", "input", "output"]
LEGIBLE = 28
"""How many boxes are looked at without searching: a page opens with no more, if it can."""


@dataclass(frozen=True)
class Box:
    """A call of a module with what is inside, a list of modules, a layer or an operation in one, an input or output.

    `start` and `stop` are the nodes inside. `level` is the coarsest level at which a box is open, None for a box with
    nothing inside and for a layer. `parent` is None for the model itself, the first of all boxes.
    """

    id: int
    parent: int | None
    role: Role
    name: str
    site: str
    kind: str
    shapes: tuple[Shape, ...]
    start: int
    stop: int
    level: Level | None = None
    children: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outline:
    """The boxes in forward order, each before those inside it, and which of those with nothing inside read which."""

    graph: Graph
    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]

    @cached_property
    def nets(self) -> Mapping[int, tuple[Net, ...]]:
        """The values that flow inside each box, by its id.

        An edge passes a port of each box that it leaves or enters:

            ┌ A ────┐   ┌ B ────┐     in A: source a, leaves     in the box around: source A, target B
            │ a ────○───○─── b  │     in B: from outside, target b
            └───────┘   └───────┘
        """
        found: dict[int, dict[int, Net]] = {}
        for origin, reader in self.edges:
            above, below = self.around(origin), self.around(reader)
            shared = next(i for i, (a, b) in enumerate(zip(above, below, strict=False)) if a != b)
            for depth in range(shared - 1, len(above) - 1):
                nets = found.setdefault(above[depth], {})
                net = nets.get(origin, Net(origin, above[depth + 1], ()))
                nets[origin] = replace(net, leaves=net.leaves or depth >= shared)
            for depth in range(shared - 1, len(below) - 1):
                nets = found.setdefault(below[depth], {})
                net = nets.get(origin, Net(origin, None, ()))
                nets[origin] = replace(net, targets=tuple(dict.fromkeys((*net.targets, below[depth + 1]))))
        return {box: tuple(nets.values()) for box, nets in found.items()}

    def around(self, box: int) -> tuple[int, ...]:
        """The boxes around one, the model first, itself last."""
        return self._around[box]

    @cached_property
    def _around(self) -> list[tuple[int, ...]]:
        lines: list[tuple[int, ...]] = []
        for box in self.boxes:
            lines.append((box.id,) if box.parent is None else (*lines[box.parent], box.id))
        return lines

    def rows(self, box: int) -> list[list[int]]:
        """The boxes inside one, in rows."""
        return rows(self.boxes[box].children, self.nets.get(box, ()))

    def opened(self, level: Level | None = None) -> frozenset[int]:
        """The boxes that are open at a level; by default one depth after another while the drawing is legible."""
        if level is not None:
            check_level(level)
            levels = LEVELS[: LEVELS.index(level) + 1]
            return frozenset(box.id for box in self.boxes if box.level in levels)
        opened: set[int] = set()
        front, seen = [0], 0
        while front:
            # A list is not a step in the computation, so it opens with what holds it.
            front += [c for box in front for c in self.boxes[box].children if self.boxes[c].role == "list"]
            inside = [c for box in front for c in self.boxes[box].children]
            seen += len(inside)
            if opened and seen > LEGIBLE:
                break
            opened.update(front)
            front = [child for child in inside if child not in opened and self.boxes[child].level]
        return frozenset(opened)

    def shown(self, opened: Iterable[int]) -> list[Box]:
        """The boxes that are seen when these are open, in forward order."""
        wide = set(opened)
        return [box for box in self.boxes if wide.issuperset(self.around(box.id)[:-1])]

    def shown_edges(self, opened: Iterable[int]) -> list[tuple[int, int]]:
        """Which of the boxes that are seen and closed read which."""
        wide = set(opened)

        def seen(box: int) -> int:
            return next(around for around in self.around(box) if around not in wide)

        ends = dict.fromkeys((seen(origin), seen(reader)) for origin, reader in self.edges)
        return [(origin, reader) for origin, reader in ends if origin != reader]

    def layers(self, start: int, stop: int) -> int:
        """How many layers begin in the nodes from `start` to `stop` - 1."""
        return self._layers[stop] - self._layers[start]

    def flops(self, start: int, stop: int) -> int:
        """The FLOPs of the nodes from `start` to `stop` - 1."""
        return self._flops[stop] - self._flops[start]

    def parameters(self, start: int, stop: int) -> int:
        """How many numbers are trained in the nodes from `start` to `stop` - 1; what is used twice counts once."""
        sizes = self._sizes
        used = {name for node in self.graph.nodes[start:stop] for name in node.inputs if name in sizes}
        return sum(sizes[name] for name in used)

    def refused(self, start: int, stop: int) -> int:
        """How many of the nodes from `start` to `stop` - 1 read the image and have no rule, so that a plan refuses."""
        return self._refused[stop] - self._refused[start]

    @cached_property
    def _refused(self) -> list[int]:
        without = {node.id for node in self.graph.unsupported()}
        return list(accumulate((node.id in without for node in self.graph), initial=0))

    @cached_property
    def _layers(self) -> list[int]:
        begins = {box.start for box in self.boxes if box.role == "layer"}
        return list(accumulate((node.id in begins for node in self.graph), initial=0))

    @cached_property
    def _flops(self) -> list[int]:
        return list(accumulate((cost.result.work for cost in node_costs(self.graph)), initial=0))

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
        self.nesting = Nesting(graph)
        self.boxes: list[Box] = []
        self.of: dict[Source, int] = {}
        """The box of each node and input."""

    def finished(self) -> Outline:
        """The outline: the model with its inputs, what happens in it, and its outputs."""
        graph, end = self.graph, len(self.graph)
        outputs = tuple(value.shape for value in graph.outputs)
        self.add(None, "block", NestedSpan(graph.calls[0].kind or "model", "", 0, end), outputs, "module")
        for value in graph.inputs:
            self.of[value.name] = self.add(0, "input", NestedSpan(value.name, "", 0, 0), (value.shape,))
        self.fill(0, 0)
        pairs = [(source, self.of[node.id]) for node in graph for source in node.needs]
        for value in graph.outputs:
            box = self.add(0, "output", NestedSpan(value.name, "", end, end), (value.shape,))
            pairs += [(source, box) for source in (value.source, *value.after)]
        inside: dict[int | None, list[int]] = {}
        for box in self.boxes:
            inside.setdefault(box.parent, []).append(box.id)
        boxes = (replace(box, children=tuple(inside.get(box.id, ()))) for box in self.boxes)
        edges = dict.fromkeys((self.of[source], box) for source, box in pairs if source in self.of)
        return Outline(graph, tuple(boxes), tuple(edges))

    def add(
        self, parent: int | None, role: Role, span: NestedSpan, shapes: Iterable[Shape], level: Level | None = None
    ) -> int:
        """Put a box into another, under its own part of its name: `conv` for `head.conv` in `head`."""
        outer = self.boxes[parent].site.partition("@")[0] if parent else ""
        name = span.name.removeprefix(f"{outer}.") if outer else span.name
        site = "" if parent is None else span.name
        self.boxes.append(
            Box(len(self.boxes), parent, role, name, site, span.kind, tuple(shapes), span.start, span.stop, level)
        )
        return len(self.boxes) - 1

    def fill(self, call: int, parent: int) -> None:
        """Put what happens in a call into its box."""
        nesting = self.nesting
        for piece in nesting.listed(call) if call == nesting.top else nesting.pieces(call):
            self.add_piece(piece, call, parent)

    def add_piece(self, piece: NestedSpan, call: int, parent: int) -> None:
        """Put one thing that happens in a call into a box."""
        nesting = self.nesting
        if len(piece.calls) > 1:
            inside = [p for p in nesting.pieces(call) if piece.start <= p.start < piece.stop]
            box = self.add(parent, "list", piece, self.shapes(inside[-1]), "block")
            for part in inside:
                self.add_piece(part, call, box)
        elif piece.calls and piece.stop - piece.start > 1 and nesting.children[piece.calls[0]]:
            inner = piece.calls[0]
            around = inner in self.wrappers()
            level: Level = "module" if around else "block" if nesting.opens(inner) else "layer"
            self.fill(inner, self.add(parent, "block", piece, self.shapes(piece), level))
        else:
            self.add_layer(piece, parent)

    def wrappers(self) -> set[int]:
        """The calls that do nothing but call the module whose children are the model's modules."""
        found: set[int] = set()
        at: int | None = self.nesting.top
        while at is not None:
            found.add(at)
            at = self.graph.calls[at].parent
        return found

    def add_layer(self, piece: NestedSpan, parent: int) -> None:
        """Put a layer into a box; one that makes several calls of functions has a box for each inside."""
        nodes = self.graph.nodes[piece.start : piece.stop]
        if len(nodes) == 1:
            while piece.calls and self.nesting.children[piece.calls[0]]:
                (piece,) = self.nesting.pieces(piece.calls[0])
            self.of[nodes[0].id] = self.add_operation(nodes[0], parent, "layer", piece)
            return
        layer = self.add(parent, "layer", piece, self.shapes(piece))
        for node in nodes:
            self.of[node.id] = self.add_operation(
                node, layer, "operation", NestedSpan(node.site, node.op, node.id, node.id + 1)
            )

    def add_operation(self, node: Node, parent: int, role: Role, piece: NestedSpan) -> int:
        """Put a node into a box, named by its operation if no module is its own."""
        box = self.add(parent, role, piece, node.output_shapes)
        if not piece.calls:
            name = node.op.removeprefix("__").removesuffix("__")
            self.boxes[box] = replace(self.boxes[box], name=name, kind="")
        return box

    def shapes(self, piece: NestedSpan) -> tuple[Shape, ...]:
        """The shapes of what a piece gives back."""
        if not piece.calls:
            return self.graph.nodes[piece.start].output_shapes
        outputs = pytree.tree_leaves(self.graph.calls[piece.calls[-1]].outputs)
        return tuple(self.shape_at(at) for at in outputs if isinstance(at, At))

    def shape_at(self, at: At) -> Shape:
        """The shape of the tensor there."""
        if isinstance(at.source, int):
            return self.graph.nodes[at.source].output_shapes[at.pick]
        values = (*self.graph.inputs, *self.graph.parameters)
        return next((value.shape for value in values if value.name == at.source), ())
