"""The work of a call: its family, operations, bytes, and the sizes on which its time depends.

Everything here follows from shapes and arguments; nothing is measured. Backward is described along with forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import log2, prod
from typing import Any

from mural.graph import Node
from mural.graph.facts import costs, fact_of
from mural.graph.nodes import Place
from mural.graph.operation_counts import argument, made, taps_of

PRODUCTS = frozenset(["conv", "transposed", "linear", "matmul", "attention"])
"""Families that are products of matrices."""


@dataclass(frozen=True)
class CallFeatures:
    """What a call does: operations, bytes that it reads and writes, and the sizes that its time depends on.

    `features` are numbers by name, sizes as logarithms to base 2; what a family does not have is absent.
    """

    family: str
    dtype: str
    operations: float
    read: int
    written: int
    features: Mapping[str, float]
    gradients: int = 0
    """Bytes of the gradients that backward makes."""


def work_of(node: Node, wanted: Collection[Place] = ()) -> CallFeatures:
    """The work of a node, a view if it gives back what it got; `wanted` are tensors whose gradients backward makes."""
    family = "view" if node.idle else fact_of(node).family
    sizes = [prod(s) * d.itemsize for s, d in zip(node.input_shapes, node.input_dtypes, strict=True)]
    written = sum(prod(s) * d.itemsize for s, d in zip(node.output_shapes, node.dtypes, strict=True))
    with_gradient = [at in wanted for at in node.reads]
    common = {
        "read": lg(sum(sizes)),
        "written": lg(written),
        "inputs": float(len(sizes)),
        "gradient": float(bool(with_gradient and with_gradient[0])),
        "half": float(bool(node.dtypes) and node.dtypes[0].itemsize == 2),
        "elements": lg(prod(node.output_shapes[0])) if node.output_shapes else 0.0,
    }
    own = DESCRIBE.get(family, describe_other)(node)
    operations = timed_operations(node, family)
    return CallFeatures(
        family=family,
        dtype=str(node.dtypes[0] if node.dtypes else "float32").removeprefix("torch."),
        operations=operations,
        read=sum(sizes),
        written=written,
        features=common | own | {"operations": lg(operations)},
        gradients=sum(size for size, has in zip(sizes, with_gradient, strict=True) if has),
    )


def timed_operations(node: Node, family: str) -> float:
    """The operations on which the time of a call depends: those of products, and of what a pool adds up.

    A maximum counts once, however many values it is taken of: the shipped models were fitted that way.
    """
    if family == "max_pool":
        return float(made(node))
    found = costs(node)
    return float(found.result.work if family == "avg_pool" else found.products if family in PRODUCTS else 0)


def lg(value: float) -> float:
    """The logarithm of a size, 0 for nothing."""
    return log2(value) if value >= 1 else 0.0


def product(value: Any, dims: int) -> float:
    """The product of an argument that is one number for all dims, or one for each."""
    if isinstance(value, (list, tuple)):
        return float(prod(value)) if len(value) != 1 else float(value[0]) ** dims
    return float(value) ** dims if isinstance(value, (int, float)) else 1.0


def largest(value: Any) -> float:
    """The largest of an argument that is one number, or one for each dim."""
    return float(max(value)) if isinstance(value, (list, tuple)) else float(value or 1)


def describe_conv(node: Node) -> dict[str, float]:
    """A convolution, plain or transposed: the sizes of the product of matrices that it is."""
    image, weight, result = node.input_shapes[0], node.input_shapes[1], node.output_shapes[0]
    transposed = "transpose" in node.op
    dims, groups = len(weight) - 2, int(argument(node, 6, "groups", 1))
    batch = image[0] if len(image) == dims + 2 else 1
    inputs = weight[0] if transposed else weight[1] * groups
    outputs = weight[1] * groups if transposed else weight[0]
    kernel, at = prod(weight[2:]), prod((image if transposed else result)[-dims:])
    stride = product(argument(node, 3, "stride", 1), dims)
    return {
        "batch": lg(batch),
        "c_in": lg(inputs),
        "c_out": lg(outputs),
        "c_in_group": lg(inputs // groups),
        "c_out_group": lg(outputs // groups),
        "groups": lg(groups),
        "depthwise": float(groups == inputs == outputs),
        "kernel": lg(kernel),
        "longest": float(max(weight[2:])),
        "wide": float(max(weight[2:]) - min(weight[2:])),
        "stride": lg(stride),
        "dilation": largest(argument(node, 7 if transposed else 5, "dilation", 1)),
        "dims": float(dims),
        "extent_in": lg(prod(image[-dims:])),
        "extent_out": lg(prod(result[-dims:])),
        "row": lg(result[-1]),
        "four": lg(prod(image[:4])),
        "aligned_in": alignment(inputs // groups),
        "aligned_out": alignment(outputs // groups),
        "aligned_row": alignment(image[-1]),
        "rows": lg(batch * at),
        "bias": float(len(node.input_shapes) > 2),
        "weights": lg(prod(weight)),
    }


def alignment(channels: int) -> float:
    """How often 2 divides a number of channels, up to 64: kernels read several at once.

    >>> alignment(48), alignment(3), alignment(1024)
    (4.0, 0.0, 6.0)
    """
    return float(min(6, (channels & -channels).bit_length() - 1))


def describe_linear(node: Node) -> dict[str, float]:
    """A product of matrices: rows × inputs × outputs, in a batch or not."""
    shapes, result = list(node.input_shapes), node.output_shapes[0]
    if node.op in ("addmm", "baddbmm"):
        shapes = shapes[1:]
    left, right = shapes[0], shapes[min(1, len(shapes) - 1)]
    inputs, outputs = left[-1] if left else 1, result[-1] if result else 1
    rows = prod(result) // max(1, outputs)
    batched = fact_of(node).family == "matmul" and len(right) > 2
    return {
        "rows": lg(rows),
        "each": lg(result[-2] if len(result) > 1 else 1) if batched else lg(rows),
        "many": lg(prod(result[:-2])) if batched else 0.0,
        "c_in": lg(inputs),
        "c_out": lg(outputs),
        "aligned_in": alignment(inputs),
        "aligned_out": alignment(outputs),
        "bias": float(len(node.input_shapes) > 2),
        "weights": lg(prod(right)),
    }


def describe_attention(node: Node) -> dict[str, float]:
    """Attention of queries to keys."""
    query, key = node.input_shapes[0], node.input_shapes[1]
    heads = prod(query[:-2])
    return {
        "many": lg(heads),
        "rows": lg(query[-2]),
        "each": lg(key[-2]),
        "c_in": lg(query[-1]),
        "bias": float(len(node.input_shapes) > 3),
    }


def describe_norm(node: Node) -> dict[str, float]:
    """A norm: how many statistics, over how many values each."""
    shape = list(node.input_shapes[0])
    batch, channels = shape[0], shape[1] if len(shape) > 1 else 1
    rows = prod(shape[:-1])
    counts = {"batch_norm": channels, "instance_norm": batch * channels, "layer_norm": rows, "rms_norm": rows}
    groups = counts[node.op] if node.op in counts else batch * int(argument(node, 1, "num_groups", 1))
    return {
        "batch": lg(batch),
        "c_in": lg(channels),
        "groups": lg(groups),
        "each": lg(prod(shape) / max(1, groups)),
        "extent_in": lg(prod(shape[2:])),
        "row": lg(shape[-1]),
        "training": float(node.op != "batch_norm" or bool(argument(node, 5, "training", True))),
    }


def describe_pool(node: Node) -> dict[str, float]:
    """A pool: the values that each result reads."""
    shape, result = node.input_shapes[0], node.output_shapes[0]
    dims = next((n for n in (1, 2, 3) if f"{n}d" in node.op), 2)
    kernel = taps_of(node) if fact_of(node).family == "avg_pool" else 1
    shrunk = prod(shape) / max(1, prod(result))
    return {
        "kernel": lg(kernel if kernel > 1 else shrunk),
        "stride": lg(shrunk),
        "dims": float(dims),
        "row": lg(result[-1] if result else 1),
        "batch": lg(shape[0]),
        "c_in": lg(shape[1] if len(shape) > 1 else 1),
    }


def describe_mean(node: Node) -> dict[str, float]:
    """A reduction: how many values become one."""
    shape, result = node.input_shapes[0], node.output_shapes[0]
    return {
        "each": lg(prod(shape) / max(1, prod(result))),
        "groups": lg(prod(result)),
        "row": lg(shape[-1] if shape else 1),
    }


def describe_resized(node: Node) -> dict[str, float]:
    """Interpolation: how much larger, by nearest neighbours or between them."""
    shape, result = node.input_shapes[0], node.output_shapes[0]
    smooth = argument(node, 2 if node.op == "grid_sample" else 3, "mode", "nearest") != "nearest"
    return {
        "smooth": float(smooth),
        "stride": lg(prod(result) / max(1, prod(shape))),
        "dims": float(len(shape) - 2),
        "row": lg(result[-1]),
        "each": lg(prod(shape[:2])),
    }


def describe_other(node: Node) -> dict[str, float]:
    """A call on each value alone: broadcasting is what matters, and which function it is."""
    result = prod(node.output_shapes[0]) if node.output_shapes else 1
    shared = [shape for shape in node.input_shapes if prod(shape) < result]
    exact = node.op.rstrip("_")
    return {
        "broadcast": float(bool(shared)),
        "row": lg(node.output_shapes[0][-1] if node.output_shapes and node.output_shapes[0] else 1),
        "relu": float(exact in ("relu", "leaky_relu", "mul")),
        "kind": float(KINDS.index(exact)) if exact in KINDS else -1.0,
        "each": lg(node.input_shapes[0][1]) if node.input_shapes and len(node.input_shapes[0]) > 1 else 0.0,
    }


KINDS = ("softmax", "log_softmax", "cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss",
         "smooth_l1_loss", "contiguous", "pad", "roll")  # fmt: skip
"""Operations that share a family, though their kernels differ."""
DESCRIBE = {
    "conv": describe_conv,
    "transposed": describe_conv,
    "linear": describe_linear,
    "matmul": describe_linear,
    "attention": describe_attention,
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm", "layer_norm"), describe_norm),
    "max_pool": describe_pool,
    "avg_pool": describe_pool,
    "mean": describe_mean,
    "interpolate": describe_resized,
}
