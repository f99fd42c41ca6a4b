"""Which values carry a gradient: those that a parameter reaches through calls that autograd follows.

The answer leans to yes: a stage that expects a gradient where none comes waits for zeros, one that expects none
where one comes would be wrong. Parameters count as trained; the model's inputs do not ask for a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from mural.graph.nodes import Graph, Node, Source

CUTS = frozenset(["detach", "detach_", "data.__get__", "data"])
"""The calls that end a gradient's way."""


def carries(dtype: torch.dtype) -> bool:
    """Whether values of this type can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def trained(graph: Graph) -> frozenset[str]:
    """The names of the parameters that have a gradient."""
    return frozenset(value.name for value in graph.parameters if value.role == "parameter" and carries(value.dtype))


def differentiable(graph: Graph) -> frozenset[Source]:
    """The trained parameters and the ids of the nodes through which a gradient passes back to one."""
    found: set[Source] = set(trained(graph))
    for node in graph:
        if node.kind != "creation" and node.op not in CUTS and _reads(node, found) and any(map(carries, node.dtypes)):
            found.add(node.id)
    return frozenset(found)


def has_gradient(source: Source, after: Iterable[int], dtype: torch.dtype, passing: Collection[Source]) -> bool:
    """Whether a value has a gradient when it is read after these calls have written to its memory."""
    return carries(dtype) and (source in passing or any(write in passing for write in after))


def _reads(node: Node, found: Collection[Source]) -> bool:
    return any(source in found for source in node.needs)
