"""Adjacency: which blocks of a graph feed which."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from mural.graph.blocks import Level, spans_of
from mural.graph.nodes import Graph

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
