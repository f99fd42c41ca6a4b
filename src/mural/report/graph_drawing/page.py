"""The page: a graph as one HTML file that needs nothing else, with blocks that fold out down to layers.

Python says what there is and in which rows it stands; the page's own JavaScript places what is open, so that a
block that is folded costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from string import Template
from typing import Any

from mural.graph.nodes import Graph
from mural.report import shell
from mural.report.graph_drawing.outline import Box, Level, Outline
from mural.report.graph_drawing.stages import DrawnStage
from mural.report.shell import asset
from mural.report.words import bytes_in_words, count_in_words, flops_in_words, shapes_in_words

FOLDER, SCRIPTS = "graph_drawing", ("layout", "inside", "draw", "app", "input")


def page(outline: Outline, stages: Sequence[DrawnStage] = (), level: Level | None = None) -> str:
    """The text of the page; `level` says what is open at first."""
    data = json.dumps(contents(outline, stages, level), ensure_ascii=False, separators=(",", ":"))
    body = Template(asset(f"{FOLDER}/page.html")).substitute(
        data=data.replace("<", "\\u003c"),  # a name may not end the script that it stands in
        script='"use strict";\n' + "\n".join(asset(f"{FOLDER}/page.{part}.js") for part in SCRIPTS),
    )
    return shell.page(outline.boxes[0].name, body, asset(f"{FOLDER}/page.css"))


def contents(outline: Outline, stages: Sequence[DrawnStage], level: Level | None) -> dict[str, Any]:
    """What the page shows, as JSON: a column for each property of a box, and the nets inside each block."""
    return {
        "title": outline.boxes[0].name,
        "summary": " · ".join(summary(outline, 0, len(outline.graph))),
        "boxes": columns(outline),
        "nets": {
            block: [
                [net.origin, -1 if net.source is None else net.source, net.targets, int(net.leaves)] for net in nets
            ]
            for block, nets in outline.nets.items()
        },
        "edges": outline.edges,
        "stages": [
            {**vars(stage), "summary": ", ".join(summary(outline, stage.start, stage.stop))} for stage in stages
        ],
        "opened": sorted(outline.opened(level)),
    }


def summary(outline: Outline, start: int, stop: int) -> list[str]:
    """What the nodes from `start` to `stop` - 1 add up to."""
    return [
        f"{outline.layers(start, stop)} layers",
        f"{count_in_words(outline.parameters(start, stop))} parameters",
        flops_in_words(outline.flops(start, stop)),
        *([f"{refused} operations without a rule"] if (refused := outline.refused(start, stop)) else []),
    ]


def columns(outline: Outline) -> dict[str, Any]:
    """The properties of all boxes, in the boxes' order."""
    boxes = outline.boxes
    sums = {"layers": outline.layers, "parameters": outline.parameters, "flops": outline.flops}
    return {
        **{name: [getattr(box, name) for box in boxes] for name in ("role", "name", "site", "kind", "start", "stop")},
        **{name: [add(box.start, box.stop) for box in boxes] for name, add in sums.items()},
        "parent": [-1 if box.parent is None else box.parent for box in boxes],
        "rows": [outline.rows(box.id) for box in boxes],
        "op": [outline.graph.nodes[box.start].op if is_call(box) else "" for box in boxes],
        "shape": [shapes_in_words(box.shapes) for box in boxes],
        "level": [box.level or "" for box in boxes],
        "refused": [int(outline.refused(box.start, box.stop) > 0) for box in boxes],
        "facts": [facts(outline.graph, box) for box in boxes],
    }


def is_call(box: Box) -> bool:
    """Whether a box is one call of a function."""
    return box.role in ("layer", "operation") and not box.children


def facts(graph: Graph, box: Box) -> list[tuple[str, str]]:
    """What else is known of a layer, as lines of the panel."""
    if not is_call(box):
        return []
    node = graph.nodes[box.start]
    known = {value.name: value for value in graph.parameters}
    images = [shape for source, shape in zip(node.inputs, node.input_shapes, strict=True) if source not in known]
    held = [known[source] for source in dict.fromkeys(node.inputs) if source in known]  # type: ignore[index]
    return [
        ("inputs", shapes_in_words(images)),
        ("type", ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in node.dtypes))),
        ("rule", node.kind or "none: mural refuses to cut what it reads"),
        ("kept for backward", bytes_in_words(sum({saved.memory: saved.bytes for saved in node.saved}.values()))),
        *((value.role, f"{value.name} {shapes_in_words([value.shape])}") for value in held),
    ]
