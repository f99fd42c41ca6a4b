"""Which calls of a streamed model run on whole tensors, and which values are kept between passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from mural.errors import PlanError
from mural.graph.nodes import Place
from mural.memory.tile_calls import TileGraph

LOOSE = 4
"""How many times the positions of a tile a whole tensor may have."""


def whole_calls(graph: TileGraph, tile: Sequence[int]) -> frozenset[int]:
    """The calls that run on whole tensors: those that cannot run on tiles, what lies between, and what comes after them
    at no higher resolution.
    """
    refused = [c for c in graph.calls if c.refused]
    if not refused:
        return frozenset()
    room = LOOSE * prod(tile)
    for call in refused:
        largest = max((positions(graph, p) for p in call.node.reads), default=0)
        if largest > room:
            raise PlanError(
                f"{call.refused} It would have to see a whole tensor of {largest:,} positions, more than {LOOSE} tiles "
                f"of {tuple(tile)}: raise stream, or move it to a lower resolution"
            )
    limit = max(positions(graph, p) for c in refused for p in c.node.reads)
    down = {c.node.id for c in refused}
    for call in graph.calls:
        if any(s in down for s in call.node.inputs) and all(positions(graph, p) <= limit for p in call.node.makes):
            down.add(call.node.id)
    up = {c.node.id for c in refused}
    for call in reversed(graph.calls):
        if call.node.id in up:
            up |= {s for s in call.node.needs if isinstance(s, int)}
    between = {i for i in down if i in up}
    after = {i for i in down if all(positions(graph, p) <= limit for p in graph.calls[i].node.reads)}
    return frozenset(between | after | {c.node.id for c in refused})


def positions(graph: TileGraph, place: Place) -> int:
    """How many positions of the image a value has."""
    value = graph.values[place]
    return prod(n for a, n in value.extents.items() if a != "data") if value.tiled else 1


def kept_values(graph: TileGraph, whole: Collection[int], keep: str | None) -> frozenset[Place]:
    """The values that are kept between passes: what whole calls read, and what norms measure.

    `keep` may be "all" or "none" of the latter.
    """
    made = {p for c in graph.calls if c.node.id not in whole for p in c.node.makes}
    written = {s for c in graph.calls for s in c.node.writes}
    kept = {p for i in whole for p in graph.calls[i].node.reads if p in made and graph.values[p].axes}
    if keep != "none":
        kept |= {
            c.node.reads[0] for c in graph.calls
            if c.norm and c.node.id not in whole and c.node.reads[0] in made and c.node.reads[0][0] not in written
        }  # fmt: skip
    outputs = {(o.source, o.pick) for o in graph.graph.outputs}
    return frozenset(kept | {p for p in outputs if p in made and any(graph.values[p].axes)})
