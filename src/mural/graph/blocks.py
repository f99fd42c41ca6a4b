"""Blocks: the calls of a graph in the groups in which the author nested them, at three levels.

    module    the model's own children; a wrapper around a single module counts as that module. The items of a
              list that run one after another are one: `down.0`, `down.1`, … are `down`
    block     the units that repeat or hold together: a residual unit, a dense layer, a cell, a double convolution
    layer     modules that call no other module, and calls of functions outside of these

Each level tiles the nodes in the order in which they ran, and a boundary of one level is one of all finer levels.
A call of a function between two modules (at the levels above `layer`) belongs to the module before it as long as it
reads nothing but that module's results, as activations and reshapes do; from the first that reads something else, as
`cat` and `add` do, they belong to the module after. Where one of the two is missing, they join the other.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from mural.graph.bytes import Bytes, bytes_of
from mural.graph.nesting import NestedSpan, layers, modules, units
from mural.graph.nodes import Graph
from mural.graph.work_and_depth import node_costs

Level = Literal["module", "block", "layer"]
LEVELS: tuple[Level, ...] = ("module", "block", "layer")


@dataclass(frozen=True)
class Block:
    """Some calls in a row: the nodes from `start` to `stop` - 1.

    `kind` is the class of the module, the operation of a function's call, or "" for a list. `parent` is the name of the
    block one level up. `parameters` counts the numbers that it trains; what two blocks share counts in both. `flops`
    are those of a forward pass, `backward_flops` those of its gradients; the bytes are those of `bytes_in`.
    """

    name: str
    level: Level
    kind: str
    start: int
    stop: int
    parent: str | None
    parameters: int
    parameter_bytes: int
    flops: int
    backward_flops: int
    activation_bytes: int
    saved_bytes: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Branch:
    """A block with the blocks of the next level that it consists of."""

    block: Block
    children: tuple[Branch, ...] = ()


def blocks(graph: Graph, level: Level = "block") -> tuple[Block, ...]:
    """The blocks of a level in the order in which they ran; together they are all nodes."""
    spans = spans_of(graph, level)
    above = spans_of(graph, LEVELS[LEVELS.index(level) - 1]) if level != LEVELS[0] else []
    starts = [span.start for span in above]
    costs = node_costs(graph)
    found = bytes_of(graph, [(span.start, span.stop) for span in spans])
    counts = {value.name: math.prod(value.shape) for value in graph.parameters if value.role == "parameter"}

    def block(span: NestedSpan, sizes: Bytes) -> Block:
        own = costs[span.start : span.stop]
        read = {source for node in graph.nodes[span.start : span.stop] for source in node.inputs if source in counts}
        return Block(
            name=span.name,
            level=level,
            kind=span.kind,
            start=span.start,
            stop=span.stop,
            parent=above[bisect_right(starts, span.start) - 1].name if above else None,
            parameters=sum(counts[str(name)] for name in read),
            parameter_bytes=sizes.parameters,
            flops=sum(cost.result.work for cost in own),
            backward_flops=sum(cost.backward.work for cost in own),
            activation_bytes=sizes.activations,
            saved_bytes=sizes.saved,
        )

    return tuple(map(block, spans, found))


def tree(graph: Graph) -> tuple[Branch, ...]:
    """The modules, each with its blocks, each with its layers."""
    by_level = [blocks(graph, level) for level in LEVELS]

    def grown(depth: int, start: int, stop: int) -> tuple[Branch, ...]:
        if depth == len(LEVELS):
            return ()
        inside = (block for block in by_level[depth] if start <= block.start and block.stop <= stop)
        return tuple(Branch(block, grown(depth + 1, block.start, block.stop)) for block in inside)

    return grown(0, 0, len(graph))


def spans_of(graph: Graph, level: Level) -> list[NestedSpan]:
    """Where the blocks of a level begin and end, without their costs."""
    check_level(level)
    return {"module": modules, "block": units, "layer": layers}[level](graph)


def check_level(level: str) -> None:
    """Raises ValueError for an unknown level."""
    if level not in LEVELS:
        raise ValueError(f"there is no level {level!r}, but {', '.join(map(repr, LEVELS))}: write 'block'")


Direction = Literal["from", "to"]


def adjacency(graph: Graph, level: Level = "block", direction: Direction = "from") -> dict[str, list[str]]:
    """For each block, in order, the blocks that it reads from, or with `direction="to"` those that it feeds.

    >>> import mural, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    >>> graph = mural.capture(net, (1, 3, 8, 8))
    >>> adjacency(graph), adjacency(graph, direction="to")
    ({'0': [], '1': ['0'], '2': ['1']}, {'0': ['1'], '1': ['2'], '2': []})
    """
    if direction not in ("from", "to"):
        raise ValueError(f"adjacency got direction={direction!r}, but it is 'from' or 'to': write 'from'")
    spans = spans_of(graph, level)
    starts = [span.start for span in spans]
    pairs: set[tuple[int, int]] = set()
    for index, span in enumerate(spans):
        for node in graph.nodes[span.start : span.stop]:
            sources = (source for source in node.needs if isinstance(source, int) and source < span.start)
            pairs.update((bisect_right(starts, source) - 1, index) for source in sources)
    found: dict[str, list[str]] = {span.name: [] for span in spans}
    for before, after in sorted(pairs):
        if direction == "from":
            found[spans[after].name].append(spans[before].name)
        else:
            found[spans[before].name].append(spans[after].name)
    return found
