"""Work and depth: the forms that the costs of calls have, from which the table of `facts` is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from mural.graph.nodes import Node
from mural.graph.operation_counts import Count, argument, made, read, shape_of

Wants = tuple[Literal["weight", "input"] | None, ...]
"""For each input of a call, which gradient it has: that of a parameter, that of another value, or none."""


@dataclass(frozen=True)
class Work:
    """A number of operations, and how many of them wait for each other."""

    work: int = 0
    depth: int = 0


@dataclass(frozen=True)
class CallCosts:
    """What a call costs: its result, the gradients of its parameters, and those of its other inputs.

    `products` are those of the result's operations that products of matrices take.
    """

    result: Work = Work()
    weights: Work = Work()
    inputs: Work = Work()
    products: int = 0

    @property
    def backward(self) -> Work:
        """Both kinds of gradient: they do not wait for each other."""
        return beside([self.weights, self.inputs])


Formula = Callable[[Node, Wants], CallCosts]


def beside(works: Iterable[Work]) -> Work:
    """Work that is done in parallel."""
    all_of = list(works)
    return Work(sum(w.work for w in all_of), max((w.depth for w in all_of), default=0))


def levels(count: float) -> int:
    """The depth of a tree that reduces this many numbers.

    >>> [levels(n) for n in (0, 1, 2, 3, 9)]
    [0, 0, 1, 2, 4]
    """
    return math.ceil(math.log2(count)) if count > 1 else 0


def gradients(node: Node, wants: Wants, of: Callable[[int], Work], operands: Iterable[int] | None = None) -> CallCosts:
    """The costs of the gradients alone, `of(i)` for the i-th input."""
    asked = [i for i in (range(len(wants)) if operands is None else operands) if i < len(wants)]
    return CallCosts(
        weights=beside(of(i) for i in asked if wants[i] == "weight"),
        inputs=beside(of(i) for i in asked if wants[i] == "input"),
    )


def with_result(result: Work, gradient: CallCosts, products: int = 0) -> CallCosts:
    """The costs of a result and of its gradients."""
    return CallCosts(result, gradient.weights, gradient.inputs, products)


# --- forms ------------------------------------------------------------------------------------------------


def free(node: Node, wants: Wants) -> CallCosts:
    """Data that is only moved."""
    return CallCosts()


def product(multiply_adds: Count, operands: tuple[int, ...] = (0, 1)) -> Formula:
    """A sum of products. Each of the tensors involved is a sum over all that does not index itself."""

    def costs(node: Node, wants: Wants) -> CallCosts:
        count = multiply_adds(node)

        def summed_into(size: int) -> Work:
            return Work(2 * count, 1 + levels(count / size)) if count else Work()

        gradient = gradients(node, wants, lambda i: summed_into(math.prod(node.input_shapes[i])), operands)
        return with_result(summed_into(made(node)), gradient, 2 * count)

    return costs


def each(operations: int = 1, gradient: int = 1) -> Formula:
    """A function of each element of the result by itself; a parameter's gradient is summed where it was repeated."""

    def costs(node: Node, wants: Wants) -> CallCosts:
        size = made(node)

        def of(i: int) -> Work:
            return Work(gradient * size, gradient + levels(size / max(1, math.prod(node.input_shapes[i]))))

        return with_result(Work(operations * size, operations), gradients(node, wants, of))

    return costs


def over(operations: int = 1, gradient: int = 1, trees: int = 1) -> Formula:
    """A reduction of the first input: `operations` per element read, `trees` of them waiting for each other."""

    def costs(node: Node, wants: Wants) -> CallCosts:
        size = read(node)
        deep = trees * levels(size / max(1, made(node)))
        gradient_of = gradients(node, wants, lambda i: Work(gradient * size, gradient), operands=(0,))
        return with_result(Work(operations * size, operations - trees + deep), gradient_of)

    return costs


def along(operations: int, gradient: int, trees: int, index: int = 1, name: str = "dim") -> Formula:
    """A reduction along a dim whose result has the extents of what was read, as softmax."""

    def costs(node: Node, wants: Wants) -> CallCosts:
        shape = node.input_shapes[0]
        dim = argument(node, index, name, -1)
        extent = shape[dim] if isinstance(dim, int) and shape else max(shape, default=1)
        deep = levels(extent)
        back = Work(gradient * read(node), gradient - 1 + deep)
        result = Work(operations * read(node), operations - trees + trees * deep)
        return with_result(result, gradients(node, wants, lambda i: back, operands=(0,)))

    return costs


def norm(reduced: Count, frozen: Callable[[Node], bool] = lambda node: False) -> Formula:
    """Mean and variance (4 per element), normalization (2), scale and shift (2); `frozen` statistics are given."""

    def costs(node: Node, wants: Wants) -> CallCosts:
        size, deep = read(node), levels(reduced(node))
        weights = Work(3 * size, 1 + deep) if "weight" in wants else Work()
        if frozen(node):
            inputs, result = Work(size, 1), Work(4 * size, 4)
        else:
            inputs, result = Work(7 * size, 6 + deep), Work(8 * size, 6 + 2 * deep)
        return CallCosts(result, weights, inputs if wants[:1] == ("input",) else Work())

    return costs


def window(taps: Count, operations: int = 1, gradient: Count | None = None) -> Formula:
    """A reduction over a window for each element of the result; its gradient goes back to each tap."""

    def costs(node: Node, wants: Wants) -> CallCosts:
        count, size = taps(node), made(node)
        back = Work(size * (gradient or taps)(node) * operations, operations)
        result = Work(operations * size * count, operations - 1 + levels(count))
        return with_result(result, gradients(node, wants, lambda i: back, operands=(0,)))

    return costs


def sorting(node: Node, wants: Wants) -> CallCosts:
    """Numbers put in order: n log n comparisons; a sorting network is log² n deep."""
    shape = node.input_shapes[0] if node.input_shapes else ()
    deep = levels(max(shape, default=1))
    return CallCosts(Work(read(node) * max(1, deep), deep * (deep + 1) // 2))


def attention(node: Node, wants: Wants) -> CallCosts:
    """Scores of queries and keys, softmax over the keys, a sum of values; four products go back."""
    query, key, value = (shape_of(node, i, name) for i, name in enumerate(("query", "key", "value")))
    scores = math.prod(query[:-1]) * key[-2]
    products = 2 * scores * (query[-1] + value[-1])
    deep = 2 + levels(query[-1]) + levels(key[-2])
    back = Work(2 * products + 4 * scores, deep + 4)
    asked = [w for w in wants[:3] if w is not None]
    result = Work(products + 5 * scores, deep + 3 + 2 * levels(key[-2]))
    return CallCosts(result, inputs=back if asked else Work(), products=products)


def multi_head(node: Node, wants: Wants) -> CallCosts:
    """Projections of queries, keys and values, attention, and the projection of what comes out."""
    query, key, value = (shape_of(node, i, name) for i, name in enumerate(("query", "key", "value")))
    width = query[-1]
    projected = 2 * width * (2 * math.prod(query) + math.prod(key) + math.prod(value))
    batch = math.prod(query[1:-1])
    scores = batch * query[0] * key[0] * int(argument(node, 4, "num_heads", 1))
    products = 4 * batch * query[0] * key[0] * width
    deep = 4 + 3 * levels(width) + levels(key[0])
    result = Work(projected + products + 5 * scores, deep + 3 + 2 * levels(key[0]))
    inside = Work(2 * products + 4 * scores, deep + 4) if any(wants) else Work()
    weights = Work(projected, 1 + levels(query[0] * batch)) if "weight" in wants else Work()
    moving = Work(projected, 1 + levels(width)) if "input" in wants[:3] else Work()
    return CallCosts(result, weights, beside([inside, moving]), projected + products)


def cross_entropy(node: Node, wants: Wants) -> CallCosts:
    """Log-softmax over the classes and the mean of what the target picks."""
    shape = node.input_shapes[0]
    classes = shape[1] if len(shape) > 1 else math.prod(shape)
    size = math.prod(shape)
    result = Work(5 * size + size // max(1, classes), 3 + 2 * levels(classes) + levels(size / max(1, classes)))
    return CallCosts(result, inputs=Work(2 * size, 2) if wants[:1] == ("input",) else Work())
