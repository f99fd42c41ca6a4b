"""Stages as a drawing shows them: which nodes belong to which, from the names at which they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mural.errors import PlanError
from mural.graph.cut_points import cut_names, node_named
from mural.graph.nodes import Graph
from mural.report.graph_drawing.outline import Outline

Stages = int | Sequence[int | str]
"""Where stages begin: ids of nodes, call-sites or calls of modules, in forward order; or how many there are, with as
many layers each."""


HUES = (210, 28, 140, 275, 345, 52, 180, 310, 100, 240, 10, 160)
"""The first stages' colours, each far from the one before; later ones go round the circle by the golden angle."""


@dataclass(frozen=True)
class DrawnStage:
    """A piece of the model: the nodes from `start` to `stop` - 1, drawn in the colour of a `hue` in degrees."""

    name: str
    hue: int
    start: int
    stop: int


def stages_of(outline: Outline, stages: Stages | None) -> tuple[DrawnStage, ...]:
    """The stages of a drawing; none where none are given."""
    if stages is None:
        return ()
    starts = equal_starts(outline, stages) if isinstance(stages, int) else starts_of(outline.graph, stages)
    ends = [*starts[1:], len(outline.graph)]
    return tuple(
        DrawnStage(f"stage {number}", HUES[number] if number < len(HUES) else round(number * 137.5) % 360, start, stop)
        for number, (start, stop) in enumerate(zip(starts, ends, strict=True))
    )


def stages_in(stages: Sequence[DrawnStage], start: int, stop: int) -> list[DrawnStage]:
    """The stages that some of the nodes from `start` to `stop` - 1 belong to."""
    return [stage for stage in stages if max(stage.start, start) < min(stage.stop, stop)]


def equal_starts(outline: Outline, count: int) -> list[int]:
    """The node at which each stage begins, if all have as many layers, up to one."""
    layers = [box.start for box in outline.boxes if box.role == "layer"]
    if not 1 <= count <= len(layers):
        raise PlanError(f"{count} stages of a model with {len(layers)} layers: give 1 to {len(layers)}")
    return [0, *(layers[len(layers) * stage // count] for stage in range(1, count))]


def starts_of(graph: Graph, stages: Sequence[int | str]) -> list[int]:
    """The node at which each stage begins. The first begins at node 0, whether that is given or not."""
    known = cut_names(graph)
    nodes = [node_named(known, stage) if isinstance(stage, str) else stage for stage in stages]
    if outside := [node for node in nodes if not 0 <= node < len(graph)]:
        raise PlanError(f"a stage cannot begin at node {outside[0]}, which is none: give an id below {len(graph)}")
    if nodes != sorted(nodes):
        raise PlanError(f"stages begin at {list(stages)}, which are nodes {nodes}: give them in forward order")
    return sorted({0, *nodes})
