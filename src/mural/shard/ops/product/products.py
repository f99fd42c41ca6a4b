"""Products of tensors: linear layers, matrix products and einsum, on cut and merged dims.

Every dim of an operand has a label, as in einsum. A mesh axis can cut one label of a product: labels of the result keep
their cuts, those of the larger operand first; the other operand is moved to match. Of the labels that are summed over,
one stays cut if the result is small: each rank then adds up its part, and the parts are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.errors import LayoutError, ShapeError, UnsupportedOp
from mural.geometry import Cuts, broadcast, slices
from mural.shard.autocasting import is_autocast
from mural.shard.folds.underneath import common_factors, opened
from mural.shard.layout import Layout
from mural.shard.ops.call_arguments import bound
from mural.shard.relayout import merged, relayout
from mural.shard.table import name_of, register, register_folded
from mural.shard.tensor import ShardedTensor

Label = Any
Labelled = tuple[Tensor, Sequence[Label]]
Piece = tuple[Label, int]
"""One of the dims that a label merges."""
Placed = dict[Piece, tuple[str | None, Cuts | None]]


def pieces_of(labels: Sequence[Label], factors: Mapping[Label, tuple[int, ...]]) -> list[Piece]:
    """The dims of an opened operand."""
    return [(label, i) for label in labels for i in range(len(factors[label]))]


def placed(
    operands: Sequence[Labelled],
    out: Sequence[Label],
    factors: Mapping[Label, tuple[int, ...]],
    *,
    summed: bool = True,
) -> Placed:
    """The mesh axis and cuts of every dim, such that no axis cuts two; without `summed`, only of the result's dims."""
    found: Placed = {}
    sharded = [(x.placement, x.numel(), labels) for x, labels in operands if isinstance(x, ShardedTensor)]
    sharded.sort(key=lambda item: -item[1])
    outputs = prod(n for label in out for n in factors.get(label, (1,)))

    def assign(cut: bool, wanted: Callable[[Label, int], bool]) -> None:
        for layout, size, labels in sharded:
            dims = zip(pieces_of(labels, factors), layout.axes, layout.cuts, layout.shape, strict=True)
            for piece, axis, cuts, extent in dims:
                free = piece not in found and axis not in [a for a, _ in found.values()]
                whole = extent == factors[piece[0]][piece[1]]
                parts = 1 if cuts is None else cuts.parts
                if axis is not None and free and whole and (parts > 1) is cut and wanted(piece[0], size // parts):
                    found[piece] = (axis, cuts)

    shared = {label for label in out if sum(label in labels for _, labels in operands) > 1}
    for cut in (True, False):
        assign(cut, lambda label, _: label in shared)
        assign(cut, lambda label, _: label in out)
        # A sum over a cut dim leaves each rank with a partial sum of the whole result: worth it if the result is small.
        assign(cut, lambda label, size: summed and label not in out and outputs <= size)
    return found


def layout_for(like: Layout, labels: Sequence[Label], factors: Mapping[Label, tuple[int, ...]], at: Placed) -> Layout:
    """The layout of a tensor with these labels."""
    pieces = pieces_of(labels, factors)
    return Layout(
        like.mesh,
        tuple(factors[label][i] for label, i in pieces),
        tuple(at.get(piece, (None, None))[0] for piece in pieces),
        tuple(at.get(piece, (None, None))[1] for piece in pieces),
        like.images,
    )


def local_part(x: Tensor, target: Layout, name: str) -> Tensor:
    """An opened operand's part for this rank, as a plain tensor."""
    lone = [d for d, n in enumerate(x.shape) if n == 1 and target.shape[d] != 1]
    for d in lone:
        target = target.with_cut(d, None, 1)
    if isinstance(x, ShardedTensor):
        return relayout(x, target, name).local
    return x[slices(target.box)]


def contraction(
    operands: Sequence[Labelled],
    out: Sequence[Label],
    run: Callable[..., Tensor],
    name: str,
    extents: Mapping[Label, int] | None = None,
) -> Tensor:
    """The product of operands with labelled dims; `run` computes it on plain pieces that have one dim for each label.

    `extents` gives those labels of the result that no operand has.
    """
    like = next(x for x, _ in operands if isinstance(x, ShardedTensor)).placement
    factors = common_factors(operands)
    for label, extent in (extents or {}).items():
        factors[label] = (extent,)
    for x, labels in operands:
        for label, extent in zip(labels, x.shape, strict=True):
            if extent not in (1, prod(factors[label])):
                raise LayoutError(f"{name}: the shapes {[tuple(t.shape) for t, _ in operands]} do not fit")
    apart = [(opened(x, labels, factors), labels) for x, labels in operands]
    at = placed(apart, out, factors)
    parts: list[Tensor] = []
    for x, labels in apart:
        part = local_part(x, layout_for(like, labels, factors, at), name)
        counts = [len(factors[label]) for label in labels]
        parts.append(merge_dims(part, counts))
    local = run(*parts)
    axes = [axis for (label, _), (axis, cuts) in at.items() if label not in out and cuts is not None and axis]
    local = merged(local, like.mesh, [a for a in axes if like.mesh.size(a) > 1], name)
    layout = layout_for(like, out, factors, at)
    local = local.reshape(layout.local_shape)
    folds = tuple(len(factors[label]) for label in out)
    return ShardedTensor(local, layout, "", folds if any(n > 1 for n in folds) else ()) if out else local


def merge_dims(x: Tensor, counts: Sequence[int]) -> Tensor:
    """A plain tensor with runs of dims merged."""
    if all(n == 1 for n in counts):
        return x
    shape: list[int] = []
    at = 0
    for n in counts:
        shape.append(prod(x.shape[at : at + n]))
        at += n
    return x.reshape(shape)


@register("product", "linear")
@register_folded("linear")
def linear(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product with a matrix along the last dim, plus a bias."""
    x, weight, bias = bound(args, kwargs, ("input", "weight", "bias"), None)
    if not isinstance(x, ShardedTensor) or isinstance(weight, ShardedTensor) or isinstance(bias, ShardedTensor):
        raise UnsupportedOp("linear needs a sharded input and plain parameters: call .full() on the others")
    if x.shape[-1] != weight.shape[-1]:
        raise ShapeError(f"linear: a weight of shape {tuple(weight.shape)} for an input of shape {tuple(x.shape)}")
    if not x.folds and not x.placement.is_cut(x.ndim - 1) and weight.ndim == 2:
        local = func(x.local, weight, bias)
        layout = x.placement.pick([*range(x.ndim - 1), None], (*x.shape[:-1], weight.shape[0]))
        return ShardedTensor(local, layout)
    labels: list[Label] = [*range(x.ndim - 1), "in"]
    if weight.ndim == 1:
        return contraction([(x, labels), (weight, ["in"])], labels[:-1], lambda a, w: func(a, w, bias), "linear")
    out = [*labels[:-1], "out"]
    product = contraction([(x, labels), (weight, ["out", "in"])], out, lambda a, w: func(a, w), "linear")
    return product if bias is None else product + bias.to(product.dtype)


@register("product", "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "dot")
@register_folded("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "dot")
def matmul(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Matrix products, batched and broadcast as torch does."""
    name = name_of(func)
    second = {"bmm": "mat2", "mm": "mat2", "mv": "vec", "dot": "tensor"}.get(name, "other")
    a, b = bound(args, kwargs, ("input", second))
    if name == "__rmatmul__":
        a, b = b, a
    wanted = {"bmm": (3, 3), "mm": (2, 2), "mv": (2, 1), "dot": (1, 1)}.get(name)
    if (wanted is not None and (a.ndim, b.ndim) != wanted) or not a.ndim * b.ndim:
        raise RuntimeError(f"{name}: tensors of {a.ndim} and {b.ndim} dims do not fit")
    batch = max(a.ndim, b.ndim) - 2
    of_a: list[Label] = [*range(batch - a.ndim + 2, batch), "row", "in"] if a.ndim > 1 else ["in"]
    of_b: list[Label] = [*range(batch - b.ndim + 2, batch), "in", "column"] if b.ndim > 1 else ["in"]
    out = [*range(max(0, batch)), *(["row"] if a.ndim > 1 else []), *(["column"] if b.ndim > 1 else [])]
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else -1]:
        raise RuntimeError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
    return contraction([(a, of_a), (b, of_b)], out, torch.matmul, name)


@register("product", "addmm", "baddbmm", "addbmm", "addmv")
@register_folded("addmm", "baddbmm", "addbmm", "addmv")
def added_product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The input times beta, plus the product times alpha."""
    name = name_of(func)
    first, second = {"addmm": ("mat1", "mat2"), "addmv": ("mat", "vec")}.get(name, ("batch1", "batch2"))
    x, a, b, beta, alpha = bound(args, kwargs, ("input", first, second, "beta", "alpha"), 1, 1)
    if (a.ndim, b.ndim) != {"addmm": (2, 2), "addmv": (2, 1)}.get(name, (3, 3)):
        raise RuntimeError(f"{name} of operands of shapes {tuple(a.shape)} and {tuple(b.shape)}: their dims do not fit")
    product = torch.matmul(a, b)
    product = product.sum(0) if name == "addbmm" else product
    if broadcast(tuple(x.shape), tuple(product.shape)) != tuple(product.shape):
        raise RuntimeError(f"{name}: an input of shape {tuple(x.shape)} for a product of shape {tuple(product.shape)}")
    if is_autocast(product.device):
        x = x.to(product.dtype)
    if not (product.is_floating_point() or product.is_complex()):
        beta, alpha = int(beta), int(alpha)
    return beta * x + alpha * product if beta else alpha * product


@register("product", "einsum")
@register_folded("einsum")
def einsum(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Einstein sums of one or more operands, two at a time."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        raise UnsupportedOp("einsum with lists of numbers for sharded tensors: write the equation as a string")
    terms, out = parsed(equation, [x.ndim for x in operands])
    if any(len(set(term)) < len(term) for term in terms):
        raise UnsupportedOp(f"einsum {equation!r} takes a diagonal, which has no rule for sharded tensors")
    labelled: list[Labelled] = list(zip(operands, terms, strict=True))
    while len(labelled) > 2:
        (a, of_a), (b, of_b), *rest = labelled
        later = {label for _, labels in rest for label in labels} | set(out)
        kept = [k for k in dict.fromkeys([*of_a, *of_b]) if k in later]
        labelled = [(product_of([(a, of_a), (b, of_b)], kept), kept), *rest]
    return product_of(labelled, out)


def product_of(labelled: Sequence[Labelled], out: Sequence[Label]) -> Tensor:
    """The sum of products of labelled tensors, over the labels that the result does not have."""
    names = {label: chr(ord("a") + i) for i, label in enumerate(dict.fromkeys(k for _, ks in labelled for k in ks))}
    equation = ",".join("".join(names[k] for k in ks) for _, ks in labelled) + "->" + "".join(names[k] for k in out)
    if not any(isinstance(x, ShardedTensor) for x, _ in labelled):
        return torch.einsum(equation, *(x for x, _ in labelled))
    return contraction(labelled, out, lambda *parts: torch.einsum(equation, *parts), "einsum")


def parsed(equation: str, ndims: Sequence[int]) -> tuple[list[list[Label]], list[Label]]:
    """The labels of every operand and of the result; an ellipsis stands for numbered labels.

    >>> parsed("...ij,jk", [3, 2])
    ([[0, 'i', 'j'], ['j', 'k']], [0, 'i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        raise RuntimeError(f"einsum {equation!r} names {len(terms)} operands, but {len(ndims)} were given")
    wide = [n - len(term.replace("...", "")) if "..." in term else 0 for term, n in zip(terms, ndims, strict=True)]
    if any(w < 0 or ("..." not in t and len(t) != n) for t, n, w in zip(terms, ndims, wide, strict=True)):
        raise RuntimeError(f"einsum {equation!r} does not fit operands of {list(ndims)} dims")
    most = max(wide, default=0)

    def labels(term: str, count: int) -> list[Label]:
        before, dots, after = term.partition("...")
        return [*before, *(range(most - count, most) if dots else ()), *after]

    found = [labels(term, count) for term, count in zip(terms, wide, strict=True)]
    if arrow:
        return found, labels(right, most)
    letters = sorted(k for term in found for k in term if isinstance(k, str))
    return found, [*range(most), *(k for k in letters if letters.count(k) == 1)]
