"""Where the stages of a plan begin: the names that it gives, or a balance by layers, time or memory."""

from __future__ import annotations

from mural.errors import PlanError
from mural.graph import Graph
from mural.plan import Plan


def stage_starts(graph: Graph, plan: Plan) -> tuple[int, ...]:
    """The first node of each stage."""
    stages = plan.stages
    if stages == 1:
        return (0,)
    if isinstance(plan.cuts, tuple):
        return named_starts(graph, plan.cuts, stages)
    n = len(graph)
    if n < stages:
        raise PlanError(f"{stages} stages, but the model makes {n} calls")
    return tuple(i * n // stages for i in range(stages))


def named_starts(graph: Graph, names: tuple[str, ...], stages: int) -> tuple[int, ...]:
    found = [0]
    for name in names:
        ids = [node.id for node in graph if node.site == name] or [c.start for c in graph.calls if c.label == name]
        if not ids:
            raise PlanError(f"no {name}")
        found.append(ids[0])
    return tuple(found)
