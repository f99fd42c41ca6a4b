"""A graph in the DOT language: a cluster for each open block, a node for each layer, edges in forward order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb

from mural.report.graph_drawing.outline import Box, Level, Outline
from mural.report.graph_drawing.stages import DrawnStage, stages_in
from mural.report.words import count_in_words, flops_in_words, shapes_in_words


def dot(outline: Outline, stages: Sequence[DrawnStage] = (), level: Level | None = None) -> str:
    """The text of a DOT file, by default with all layers; blocks that are folded at a level are nodes."""
    opened = outline.opened(level or "layer")
    lines = [
        f"digraph {quoted(outline.boxes[0].name)} {{",
        "  rankdir=TB;",
        '  graph [fontname="sans-serif", fontsize=12, style=rounded, color=gray60];',
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif", fontsize=11];',
        "  edge [color=gray40, arrowsize=0.7];",
        *box_lines(outline, outline.boxes[0], opened, stages, 1),
        *(f"  n{origin} -> n{reader};" for origin, reader in outline.shown_edges(opened)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def box_lines(
    outline: Outline, box: Box, opened: frozenset[int], stages: Sequence[DrawnStage], depth: int
) -> Iterator[str]:
    """The lines of a box and of what is seen inside it; the model itself has no cluster around it."""
    pad = "  " * depth
    if box.id not in opened:
        yield f"{pad}n{box.id} [{attributes(outline, box, stages)}];"
        return
    inner = depth if box.parent is None else depth + 1
    if box.parent is not None:
        yield f"{pad}subgraph cluster_{box.id} {{"
        yield f"{pad}  label={quoted(f'{box.name} {box.kind}'.strip())};"
    for child in box.children:
        yield from box_lines(outline, outline.boxes[child], opened, stages, inner)
    if box.parent is not None:
        yield f"{pad}}}"


def attributes(outline: Outline, box: Box, stages: Sequence[DrawnStage]) -> str:
    """What a node says, what it says under the mouse, and its stage's colour: two where it lies in several."""
    inside = stages_in(stages, box.start, box.stop)
    where = ", ".join(stage.name for stage in inside)
    label = [box.name, box.kind, shapes_in_words(box.shapes), where]
    given = {"label": quoted("\n".join(filter(None, label))), "tooltip": quoted(tooltip(outline, box))}
    if box.role in ("input", "output"):
        given |= {"shape": "ellipse", "style": "dashed"}
    if inside:
        given["fillcolor"] = quoted(":".join(dict.fromkeys((colour(inside[0]), colour(inside[-1])))))
    return ", ".join(f"{key}={value}" for key, value in given.items())


def tooltip(outline: Outline, box: Box) -> str:
    """The full name of a box, with its parameters and FLOPs."""
    if box.role in ("input", "output"):
        return f"{box.role} {box.site}"
    parameters, flops = outline.parameters(box.start, box.stop), outline.flops(box.start, box.stop)
    return f"{box.site or box.name}: {count_in_words(parameters)} parameters, {flops_in_words(flops)}"


def colour(stage: DrawnStage) -> str:
    """A stage's colour, light enough for black text.

    >>> colour(DrawnStage("stage 0", 210, 0, 1))
    '#d4e8fc'
    """
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(stage.hue / 360, 0.91, 0.87))


def quoted(text: str) -> str:
    r"""A string of the DOT language, each line of it centred.

    >>> print(quoted('say "hi"\nagain'))
    "say \"hi\"\nagain"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
