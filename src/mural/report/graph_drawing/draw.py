"""Drawings of a graph: a page that folds out, DOT, or plain text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mural.errors import ConfigError
from mural.graph.nodes import Graph
from mural.report.graph_drawing.dot import dot
from mural.report.graph_drawing.outline import Level, outline
from mural.report.graph_drawing.page import page
from mural.report.graph_drawing.stages import Stages, stages_of
from mural.report.graph_drawing.text import text

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
        Path(path).write_text(drawing, encoding="utf-8")
    return drawing
