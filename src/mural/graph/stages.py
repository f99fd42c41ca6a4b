"""Stages as a drawing shows them: which nodes belong to which, from the names at which they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mural.errors import PlanError
from mural.graph.nodes import Graph
from mural.graph.outline import Outline
from mural.plan import Plan

Stages = Sequence[int | str] | Plan
"""Where stages begin: ids of nodes, call-sites or calls of modules, in forward order; or a plan that names them."""


HUES = (210, 28, 140, 275, 345, 52, 180, 310, 100, 240, 10, 160)
"""The first stages' colours, each far from the one before; later ones go round the circle by the golden angle."""


@dataclass(frozen=True)
class Stage:
    """A piece of the model: the nodes from `start` to `stop` - 1, drawn in the colour of a `hue` in degrees."""

    name: str
    hue: int
    start: int
    stop: int
    parameters: int
    flops: int


def stages_of(outline: Outline, stages: Stages | None) -> tuple[Stage, ...]:
    """The stages of a drawing; none where none are given."""
    if stages is None or (isinstance(stages, Plan) and stages.stage == 1):
        return ()
    starts = starts_of(outline.graph, named_cuts(stages) if isinstance(stages, Plan) else stages)
    ends = [*starts[1:], len(outline.graph)]
    return tuple(
        Stage(f"stage {number}", hue(number), start, stop, outline.parameters(start, stop), outline.flops(start, stop))
        for number, (start, stop) in enumerate(zip(starts, ends, strict=True))
    )


def stages_in(stages: Sequence[Stage], start: int, stop: int) -> list[Stage]:
    """The stages that some of the nodes from `start` to `stop` - 1 belong to."""
    return [stage for stage in stages if max(stage.start, start) < min(stage.stop, stop)]


def hue(number: int) -> int:
    """The colour of a stage, in degrees."""
    return HUES[number] if number < len(HUES) else round(number * 137.5) % 360


def named_cuts(plan: Plan) -> tuple[str, ...]:
    """The names at which the stages of a plan begin."""
    if isinstance(plan.cuts, str):
        raise PlanError(
            f'cuts = "{plan.cuts}" balances stages by a rule, which does not say where they begin: give the names of '
            f"the blocks at which they do"
        )
    return plan.cuts


def starts_of(graph: Graph, stages: Sequence[int | str]) -> list[int]:
    """The node at which each stage begins. The first begins at node 0, whether that is given or not."""
    named = {call.label: call.start for call in reversed(graph.calls) if call.label and call.start < call.stop}
    named.update({node.site: node.id for node in graph.nodes})
    starts = [0]
    for stage in stages:
        start = named.get(stage, -1) if isinstance(stage, str) else stage
        if not 0 <= start < len(graph):
            raise PlanError(
                f"a stage begins at {stage!r}, which is none of the {len(graph)} nodes of this graph nor the name of a "
                f"call in it: give an id below {len(graph)}, a module's path or a call-site"
            )
        if start < starts[-1]:
            raise PlanError(
                f"a stage begins at {stage!r}, node {start}, but the one before it at node {starts[-1]}: give the "
                f"beginnings in forward order"
            )
        if start > starts[-1]:
            starts.append(start)
    return starts
