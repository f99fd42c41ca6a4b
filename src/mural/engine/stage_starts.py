"""Where the stages of a plan begin: the names that it gives, or a balance by layers, time or memory."""

from __future__ import annotations

from mural import cost
from mural.errors import PlanError
from mural.graph import Graph
from mural.graph.cut_points import resolve_cuts
from mural.pipeline.partition import OBJECTIVES, partition
from mural.plans import Plan, bytes_of


def stage_starts(graph: Graph, plan: Plan, hardware: str = "cpu") -> tuple[int, ...]:
    """The first node of each stage; time is that of some known hardware, the same on every rank."""
    if plan.stages == 1:
        return (0,)
    if isinstance(plan.cuts, tuple):
        if len(plan.cuts) != plan.stages - 1:
            raise PlanError(
                f"{len(plan.cuts)} cuts {list(plan.cuts)} make {len(plan.cuts) + 1} stages, but the plan has "
                f"{plan.stages}: name the block at which each stage but the first begins"
            )
        return (0, *resolve_cuts(graph, plan.cuts))
    if plan.cuts not in OBJECTIVES:
        names = ", ".join(map(repr, OBJECTIVES))
        raise PlanError(f"cuts = {plan.cuts!r}: balance by {names}, or name the blocks at which stages begin")
    limit = bytes_of(plan.memory) if plan.memory and not plan.offload else None  # what has no room leaves
    timed = plan.cuts in ("time", "both")
    seconds = [s.forward + s.backward for s in cost.seconds(graph, hardware)] if timed else None
    found = partition(
        graph, plan.stages, plan.cuts, limit=limit, microbatches=under_way(plan), seconds=seconds, hardware=hardware
    )
    return (0, *found.cuts)


def under_way(plan: Plan) -> list[int]:
    """How many micro-batches each stage holds at a time, at most."""
    most = {
        "sequential": [1] * plan.stages,
        "gpipe": [plan.microbatches] * plan.stages,
        "gems": [1 if plan.gems == "lean" else plan.stages] * plan.stages,
    }.get(plan.schedule, [plan.stages - stage for stage in range(plan.stages)])
    return [max(1, min(plan.microbatches, count)) for count in most]
