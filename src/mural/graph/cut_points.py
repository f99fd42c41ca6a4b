"""Cuts by name: where a stage may begin, what that place is called, and which place a name means.

A cut is named by what the stage begins with: the call of a module (`layer2`, `layer2@2`), a list of modules (`down`,
which begins where its first item does) or a call-site (`up.0/cat:1`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from mural.errors import PlanError
from mural.graph.blocks import Level, spans_of
from mural.graph.liveness import refused
from mural.graph.nodes import Graph


def cut_points(graph: Graph, level: Level = "layer") -> tuple[int, ...]:
    """The nodes at which a stage other than the first may begin: where the level's blocks do, unless it is refused."""
    barred = refused(graph)
    return tuple(span.start for span in spans_of(graph, level) if span.start > 0 and span.start not in barred)


def cut_name(graph: Graph, node: int) -> str:
    """The name of the cut before a node: the outermost call of a module that begins there, else the call-site."""
    for call in graph.calls[1:]:
        if call.start == node < call.stop and not (call.start == 0 and call.stop == len(graph)):
            return call.label
    return graph.nodes[node].site


def cut_names(graph: Graph) -> dict[str, int]:
    """All names by which a cut may be called, with the node at which the stage begins."""
    found: dict[str, int] = {}
    for call in graph.calls[1:]:
        if call.stop > call.start:
            parts = call.module.split(".")
            for length in range(1, len(parts)):
                found.setdefault(".".join(parts[:length]), call.start)
            found[call.label] = call.start
    return found | {node.site: node.id for node in graph}


def node_named(known: Mapping[str, int], name: str) -> int:
    """The node that a name means; raises PlanError, with the names that are close, for an unknown one."""
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.4)
    some = ", ".join(map(repr, list(known)[:8])) + ", …" * (len(known) > 8)
    hint = f"write {' or '.join(map(repr, near))}" if near else f"write one of {some}"
    raise PlanError(f"a stage cannot begin at {name!r}: there is no such module or call in the model; {hint}")


def resolve_cuts(graph: Graph, names: Sequence[str]) -> tuple[int, ...]:
    """The nodes at which stages begin, for the names of the cuts in order; raises PlanError for invalid cuts."""
    known = cut_names(graph)
    nodes = [node_named(known, name) for name in names]
    _check_order(graph, names, nodes)
    barred = refused(graph)
    for name, node in zip(names, nodes, strict=True):
        if node in barred:
            free = [cut for cut in cut_points(graph) if cut > node]
            fix = f"begin at {cut_name(graph, free[0])!r}" if free else "leave it out"
            raise PlanError(f"a stage cannot begin at {name!r}: {barred[node]}, which a copy would miss; {fix}")
    return tuple(nodes)


def _check_order(graph: Graph, names: Sequence[str], nodes: Sequence[int]) -> None:
    """Raises PlanError for cuts that leave a stage empty, or that are not in the order in which the model runs."""
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise PlanError(f"two stages cannot both begin at {twice!r}: name each cut once")
    in_order = [names[i] for i in sorted(range(len(names)), key=lambda i: nodes[i])]
    if in_order != list(names):
        raise PlanError(f"the cuts {list(names)} are not in the order in which the model runs: write {in_order}")
    for i, (name, node) in enumerate(zip(names, nodes, strict=True)):
        if node == 0:
            raise PlanError(
                f"a stage cannot begin at {name!r}: the first stage does, and nothing is before it: leave it out"
            )
        if i and nodes[i - 1] == node:
            raise PlanError(
                f"{names[i - 1]!r} and {name!r} begin at the same call, with nothing between them: leave one out"
            )
