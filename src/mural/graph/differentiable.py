"""Which values carry a gradient: those that a parameter reaches through calls that autograd follows.

When in doubt, the answer is yes: a stage that expects a gradient where none comes waits for zeros, one that expects
none where one comes would be wrong. Parameters count as trained.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from mural.graph.facts import follows
from mural.graph.nodes import Graph, Place


def carries(dtype: torch.dtype) -> bool:
    """Whether values of this type can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def differentiable(graph: Graph, image: bool = False, leaves: Collection[str] | None = None) -> frozenset[Place]:
    """The tensors through which a gradient passes back to a parameter, parameters included; or to an input, if `image`.

    `leaves` are the names of the parameters and inputs that count instead. What was written to memory through another
    tensor is read there too.
    """
    trained = [value for value in graph.parameters if value.role == "parameter"]
    values = [*trained, *(graph.inputs if image else ())]
    if leaves is not None:
        values = [value for value in (*graph.parameters, *graph.inputs) if value.name in leaves]
    found: set[Place] = {(v.name, 0) for v in values if carries(v.dtype)}
    passing: set[int] = set()
    for node in graph:
        if node.detached and not node.writes:
            continue
        if follows(node) and (any(read in found for read in node.reads) or not passing.isdisjoint(node.after)):
            made = [place for place, dtype in zip(node.makes, node.dtypes, strict=True) if carries(dtype)]
            found.update(made)
            if made:
                passing.add(node.id)
    return frozenset(found)
