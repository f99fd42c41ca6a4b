"""Bytes of a graph: parameters, buffers, what calls make, and what backward keeps; shared memory counts once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from mural.graph.facts import fact_of
from mural.graph.nodes import Graph, Node, Ref, Shape, Source, Value


@dataclass(frozen=True)
class Bytes:
    """The bytes of some calls.

    Of the parameters and buffers (and constants) that they read, of their results that have memory of their own,
    and of what their backward keeps that is neither parameter nor buffer.
    """

    parameters: int = 0
    buffers: int = 0
    activations: int = 0
    saved: int = 0


@dataclass(frozen=True)
class HeldMemory:
    """A piece of memory that a call holds on to: who it is, and its size."""

    memory: object
    bytes: int


def size_of(shape: Shape, dtype: torch.dtype) -> int:
    """The bytes of a tensor of its own.

    >>> size_of((2, 3), torch.float16)
    12
    """
    return math.prod(shape) * dtype.itemsize


def bytes_in(graph: Graph, start: int = 0, stop: int | None = None) -> Bytes:
    """The bytes of the calls from `start` to `stop` - 1, by default of the whole graph."""
    return bytes_of(graph, [(start, len(graph) if stop is None else stop)])[0]


def bytes_of(graph: Graph, spans: Iterable[tuple[int, int]]) -> tuple[Bytes, ...]:
    """The bytes of the calls of each span."""
    known = {value.name: value for value in graph.parameters}
    sizes = {name: size_of(value.shape, value.dtype) for name, value in known.items()}
    owners = owning(graph)

    def of(nodes: Sequence[Node]) -> Bytes:
        read = {source for node in nodes for source in node.inputs if source in known}
        trained = [sizes[str(name)] for name in read if known[str(name)].role == "parameter"]
        saved = {held.memory: held.bytes for node in nodes for held in kept(node, known)}
        return Bytes(
            parameters=sum(trained),
            buffers=sum(sizes[str(name)] for name in read) - sum(trained),
            activations=sum(made_bytes(node, owners) for node in nodes),
            saved=sum(saved.values()),
        )

    return tuple(of(graph.nodes[start:stop]) for start, stop in spans)


def kept(node: Node, known: Mapping[str, Value]) -> list[HeldMemory]:
    """What backward keeps for a call, without the parameters and buffers."""
    return [HeldMemory(saved.memory, saved.bytes) for saved in node.saved if saved.owner not in known]


def owning(graph: Graph) -> frozenset[Source]:
    """The nodes that were seen to have memory of their own."""
    return frozenset(saved.owner for node in graph for saved in node.saved if saved.owner is not None)


def made_bytes(node: Node, owners: frozenset[Source]) -> int:
    """The bytes that a call makes: none where it writes in place or returns a view."""
    if lies_in(node, owners) is not None:
        return 0
    return sum(size_of(shape, dtype) for shape, dtype in zip(node.output_shapes, node.dtypes, strict=True))


def lies_in(node: Node, owners: frozenset[Source]) -> Source | None:
    """The source whose memory a call's result shares, None if it has its own.

    A reshape is taken for a view unless backward was seen to keep its result as memory of its own.
    """
    for source, shape in zip(node.inputs, node.input_shapes, strict=True):
        if source in node.writes and node.output_shapes[:1] == (shape,):
            return source
    views = fact_of(node).alias and node.inputs and node.id not in owners
    if not views or node.dtypes[0] != node.input_dtypes[0] or indexed(node):
        return None
    return node.inputs[0]


def indexed(node: Node) -> bool:
    """Whether a call picks elements by a tensor or a list, which copies."""
    picked = node.args[1:] if node.op == "__getitem__" else ()
    leaves = pytree.tree_leaves(picked, is_leaf=lambda item: isinstance(item, list))
    return any(isinstance(leaf, (Ref, list)) for leaf in leaves)
