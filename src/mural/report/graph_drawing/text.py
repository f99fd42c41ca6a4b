"""A graph as plain text: an indented tree of blocks and layers, in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

from mural.report.graph_drawing.outline import Box, Level, Outline
from mural.report.graph_drawing.stages import DrawnStage, stages_in
from mural.report.words import aligned, count_in_words, shapes_in_words


def text(outline: Outline, stages: Sequence[DrawnStage] = (), level: Level | None = None) -> str:
    """The table, by default with all layers; where a stage begins, a line says so."""
    shown = outline.shown(outline.opened(level or "layer"))
    heads = ["layer", "kind", "output", "parameters", "FLOPs", *(["stage"] if stages else [])]
    rows = [cells(outline, box, stages) for box in shown]
    head, *lines = aligned([heads, *rows], right=[heads.index("parameters"), heads.index("FLOPs")])
    return "\n".join([head, "-" * max(map(len, (head, *lines))), *lines]) + "\n"


def cells(outline: Outline, box: Box, stages: Sequence[DrawnStage]) -> list[str]:
    """One row of the table."""
    depth = len(outline.around(box.id)) - 1
    outside = box.role in ("input", "output")
    numbers = [outline.parameters(box.start, box.stop), outline.flops(box.start, box.stop)]
    row = [
        "  " * depth + box.name,
        box.role if outside else box.kind,
        shapes_in_words(box.shapes),
        *("" if outside else count_in_words(number) for number in numbers),
    ]
    return [*row, stage_mark(box, stages)] if stages else row


def stage_mark(box: Box, stages: Sequence[DrawnStage]) -> str:
    """The stages that a box lies in: `1`, or `0-2` for one that is cut."""
    inside = [stage.name.removeprefix("stage ") for stage in stages_in(stages, box.start, box.stop)]
    return inside[0] if len(inside) == 1 else f"{inside[0]}-{inside[-1]}" if inside else ""
