"""Counts that are read off a recorded call: elements, multiply-adds, taps of a window, what a norm reduces over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mural.graph.nodes import Node, Ref, Shape

Count = Callable[[Node], int]


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """The argument of a call, given by place or by name."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def shape_of(node: Node, index: int, name: str) -> Shape:
    """The shape of a tensor among the arguments, () if there is none."""
    found = argument(node, index, name)
    return node.input_shapes[found.index] if isinstance(found, Ref) else ()


def made(node: Node) -> int:
    """The elements of the first result."""
    return math.prod(node.output_shapes[0])


def read(node: Node) -> int:
    """The elements of the first tensor that is read; those made where none is."""
    return math.prod(node.input_shapes[0]) if node.input_shapes else made(node)


def conv(node: Node) -> int:
    """Each element of the result reads a kernel's channels and taps."""
    return made(node) * math.prod(shape_of(node, 1, "weight")[1:])


def conv_transpose(node: Node) -> int:
    """Each element that is read goes to a kernel's channels and taps."""
    return read(node) * math.prod(shape_of(node, 1, "weight")[1:])


def linear(node: Node) -> int:
    """Each element of the result reads the last dim."""
    return made(node) * (node.input_shapes[0][-1] if node.input_shapes[0] else 1)


def reversed_matmul(node: Node) -> int:
    """`__rmatmul__(a, b)` is b @ a."""
    return made(node) * node.input_shapes[-1][-1]


def added_matmul(node: Node) -> int:
    """`addmm(sum, a, b)`: the sum is a bias."""
    return made(node) * node.input_shapes[1][-1]


def added_bmm(node: Node) -> int:
    """`addbmm(sum, a, b)`: the batch is summed too."""
    return math.prod(node.input_shapes[1]) * node.input_shapes[2][-1]


def einsum(node: Node) -> int:
    """Every combination of the indices, for all operands but the first.

    Indices that `...` stands for are those of the operand with most of them.
    """
    terms = str(node.args[0]).replace(" ", "").partition("->")[0].split(",")
    extents: dict[str, int] = {}
    rest: tuple[int, ...] = ()
    for term, shape in zip(terms, node.input_shapes, strict=False):
        before, dots, behind = term.partition("...")
        tail = len(shape) - len(behind)
        named = [*zip(before, shape, strict=False), *zip(behind, shape[tail:], strict=False)]
        for label, extent in named:
            extents[label] = max(extent, extents.get(label, 1))
        rest = max(rest, shape[len(before) : tail] if dots else (), key=math.prod)
    return math.prod(extents.values()) * math.prod(rest) * max(1, len(terms) - 1)


def taps_of(node: Node) -> int:
    """The elements in a pool's window."""
    dims = len(node.output_shapes[0]) - 2 if "1d" not in node.op else 1
    kernel = argument(node, 1, "kernel_size", 1)
    return math.prod(kernel) if isinstance(kernel, Sequence) else int(kernel) ** max(1, dims)


def adaptive_taps(node: Node) -> int:
    """The elements in an adaptive pool's largest window."""
    pairs = zip(node.input_shapes[0], node.output_shapes[0], strict=True)
    return math.prod(math.ceil(extent / out) for extent, out in pairs if out)


TAPS: Mapping[str, int] = {"nearest": 0, "nearest-exact": 0, "bicubic": 4}
"""How many points of each dim an interpolation weighs; two where the name says nothing else."""


def interpolation_taps(node: Node) -> int:
    """The points that an interpolated value weighs."""
    mode = argument(node, 3, "mode", "nearest")
    dims = 2 if mode == "bicubic" else len(node.output_shapes[0]) - 2
    return TAPS.get(mode, 2) ** dims


def sampled_taps(node: Node) -> int:
    """The points that a sampled value weighs."""
    return TAPS.get(argument(node, 2, "mode", "bilinear"), 2) ** (len(node.output_shapes[0]) - 2)


def extents_behind(node: Node) -> int:
    """Batch norm: all but the channels."""
    shape = node.input_shapes[0]
    return math.prod(shape) // max(1, shape[1]) if len(shape) > 1 else 1


def positions(node: Node) -> int:
    """Instance norm: the positions."""
    return math.prod(node.input_shapes[0][2:])


def group(node: Node) -> int:
    """Group norm: the positions and channels of a group."""
    shape = node.input_shapes[0]
    return math.prod(shape[1:]) // max(1, int(argument(node, 1, "num_groups", 1)))


def normalized_shape(node: Node) -> int:
    """Layer norm: the dims that it was given."""
    return math.prod(argument(node, 1, "normalized_shape", ()))


def statistics_given(node: Node) -> bool:
    """Batch norm outside of training."""
    return not argument(node, 5, "training", False)


def input_statistics_given(node: Node) -> bool:
    """Instance norm with running statistics."""
    return not argument(node, 5, "use_input_stats", True)
