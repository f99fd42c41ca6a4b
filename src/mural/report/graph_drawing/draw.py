"""Drawings of a graph: a page that folds out, DOT, or plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from pathlib import Path

from mural.errors import ConfigError
from mural.graph.nodes import Graph
from mural.report.graph_drawing.outline import Box, Level, Outline, outline
from mural.report.graph_drawing.page import is_call, page
from mural.report.graph_drawing.stages import DrawnStage, Stages, stages_in, stages_of
from mural.report.words import aligned, count_in_words, flops_in_words, shapes_in_words
from mural.text_files import save_text

NO_RULE = " (no rule)"
"""What marks an operation that mural refuses on a cut image."""


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
    mark = NO_RULE if is_call(box) and outline.refused(box.start, box.stop) else ""
    numbers = [outline.parameters(box.start, box.stop), outline.flops(box.start, box.stop)]
    row = [
        "  " * depth + box.name,
        box.role if outside else f"{box.kind}{mark}",
        shapes_in_words(box.shapes),
        *("" if outside else count_in_words(number) for number in numbers),
    ]
    return [*row, stage_mark(box, stages)] if stages else row


def stage_mark(box: Box, stages: Sequence[DrawnStage]) -> str:
    """The stages that a box is in: `1`, or `0-2` for one that is cut."""
    inside = [stage.name.removeprefix("stage ") for stage in stages_in(stages, box.start, box.stop)]
    return inside[0] if len(inside) == 1 else f"{inside[0]}-{inside[-1]}" if inside else ""


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
    """What a node says, what it says under the mouse, and its stage's colour: two where it is in several."""
    inside = stages_in(stages, box.start, box.stop)
    where = ", ".join(stage.name for stage in inside)
    label = [box.name, box.kind, shapes_in_words(box.shapes), where]
    given = {"label": quoted("\n".join(filter(None, label))), "tooltip": quoted(tooltip(outline, box))}
    if box.role in ("input", "output"):
        given |= {"shape": "ellipse", "style": "dashed"}
    if outline.refused(box.start, box.stop):
        given |= {"color": "red", "penwidth": "2"}
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


FORMATS: Mapping[str, Callable[..., str]] = {".html": page, ".htm": page, ".dot": dot, ".gv": dot, ".txt": text}
"""What writes a file, by its suffix."""


def draw(graph: Graph, path: str | Path | None = None, stages: Stages | None = None, level: Level | None = None) -> str:
    """The drawing of a graph, written to a file where one is given: .html, .dot or .txt; without one it is text.

    All show one box for each layer, none for weights, in forward order, inside the blocks of the model's author.
    `stages` colours the pieces of a split model: the nodes, call-sites or modules at which they begin, or a plan that
    names them. `level` is what is open: "module" the model alone, "block" all but the innermost blocks, "layer" all;
    by default a page opens as far as that fits, and the others show all layers.
    """
    suffix = ".txt" if path is None else Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(f"{path} would be a drawing of an unknown kind: let its name end in {', '.join(FORMATS)}")
    shown = outline(graph)
    drawing = FORMATS[suffix](shown, stages_of(shown, stages), level)
    if path is not None:
        save_text(path, drawing)
    return drawing
