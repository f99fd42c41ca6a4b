"""Samples of our own: what models do with images between layers, and what torch has no samples of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hunt.rules_draw import Call, Draw, call, method


def indexed(d: Draw) -> Call:
    """A slice, or an index."""
    x = d.image()
    n, _, h, w = x.shape
    rows, columns = d.of(slice(None), slice(1, None), slice(None, -1), slice(0, h // 2)), slice(None, None, d.int(1, 3))
    index = d.of(
        (..., rows, columns),
        (slice(None), d.int(0, 2)),
        (..., d.int(-w, w - 1)),
        (..., None, rows, slice(None)),
        (slice(None), [2, 0]),
        (..., d.whole(0, w, 4)),
        (slice(None), slice(None), d.whole(-h, h, 3)),
        x.mean((0, 2, 3)) > 0,
        (slice(None), x[0].mean((1, 2)) > 0),
        x > 0.5,
        (d.whole(0, n, 2), d.whole(0, 3, 2)),
        (d.int(0, n - 1), slice(None), rows),
        (..., d.whole(0, h, 2, 1), d.whole(0, w, 3)),
    )
    return call(operator.getitem, x, index)


def written(d: Draw) -> Call:
    """An assignment to a slice; the call returns the tensor."""
    x = d.image()
    h, w = x.shape[2:]
    rows = d.of(slice(None), slice(1, h - 1), slice(0, h // 2), d.int(0, h - 1))
    index = d.of((..., rows, slice(None)), (slice(None), d.int(0, 2)), (..., slice(1, w, 2)), x > 0.3, (d.int(-1, 0),))
    value = d.of(0.5, d.normal(1), -x[index], x[index] * 2 + 1)

    def assign(target: Tensor, value: Any) -> Tensor:
        made = target.clone()
        made[index] = value
        return made

    return call(assign, x, value)


def in_slice(d: Draw) -> Call:
    """An in-place operation on a slice of a tensor."""
    x = d.image()
    h, w = x.shape[2:]
    index = d.of((..., slice(1, h), slice(None)), (slice(None), slice(0, 2)), (..., slice(None, None, 2)), (..., w - 1))
    name = d.of("mul_", "add_", "clamp_", "zero_", "neg_", "copy_", "fill_", "sub_")
    given = {"clamp_": (-0.5, 0.5), "zero_": (), "neg_": (), "copy_": (x[index] * 3,), "fill_": (2.0,)}.get(
        name, (3.0,)
    )

    def write(target: Tensor) -> tuple[Tensor, Tensor]:
        made = target * 1.0
        part = made[index]
        getattr(part, name)(*given)
        return made, part

    return call(write, x)


def binary(d: Draw) -> Call:
    """A Python operator between an image and something that it broadcasts with."""
    x = d.image()
    sign = d.of(
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "gt", "le", "eq", "ne", "iadd", "imul", "isub"
    )
    n, c, h, w = x.shape
    other = d.of(2.0, 3, d.normal(*x.shape), d.normal(c, 1, 1), d.normal(w), d.normal(n, 1, h, 1), d.normal())
    if isinstance(other, Tensor) and sign in ("pow", "mod", "floordiv"):
        x, other = x.abs() + 0.5, other.abs() + 0.5
    function = getattr(operator, sign)
    if sign.startswith("i"):
        return call(lambda a, b: function(a.clone(), b), x, other)
    return call(function, other, x) if d.of(True, False, False) else call(function, x, other)


def reduced(d: Draw) -> Call:
    """A reduction over some dims of an image."""
    x = d.image(d.int(1, 3))
    name = d.of("sum", "mean", "amax", "amin", "std", "var", "prod", "logsumexp", "norm", "nansum", "count_nonzero")
    given = {} if name == "count_nonzero" else {"keepdim": d.of(True, False)}
    if name == "prod":
        return call(torch.prod, x, dim=d.dim(x), **given)
    if name in ("std", "var") and d.of(True, False):
        given["correction"] = d.of(0, 1, 2)
    if name == "norm":
        given["p"] = d.of(1, 2, 3, float("inf"), -float("inf"), 0, "fro", 0.5)
    return call(getattr(torch, name), x, dim=d.dims(x), **given)


def one_of_all(d: Draw) -> Call:
    """A reduction that finds positions, an order, or a scan along one dim of an image."""
    x = d.image(d.int(1, 3))
    name = d.of(
        "max",
        "min",
        "argmax",
        "argmin",
        "median",
        "mode",
        "kthvalue",
        "sort",
        "argsort",
        "topk",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "softmax",
        "log_softmax",
        "nanmedian",
        "quantile",
        "all",
        "any",
        "unbind",
        "flip",
        "diff",
        "aminmax",
        "std_mean",
        "var_mean",
        "msort",
        "logsumexp",
    )
    dim = d.dim(x)
    if name in ("kthvalue", "topk"):
        return call(getattr(torch, name), x, d.int(1, x.shape[dim]), dim=dim)
    if name == "quantile":
        return call(torch.quantile, x, d.of(0.25, 0.5), dim=dim)
    if name == "msort":
        return call(torch.msort, x)
    return call(getattr(torch, name), x, dims=(dim,)) if name == "flip" else call(getattr(torch, name), x, dim=dim)


def shaped(d: Draw) -> Call:
    """Another shape of an image."""
    x = d.image()
    n, c, h, w = x.shape
    a = d.int(0, 3)
    return d.of(
        call(torch.flatten, x, a, d.int(a, 3)),
        call(torch.permute, x, tuple(d.random.sample(range(4), 4))),
        call(torch.transpose, x, d.dim(x), d.dim(x)),
        call(torch.movedim, x, d.dim(x), d.dim(x)),
        call(method("view"), x, n, c, -1),
        call(torch.reshape, x, (n, -1, w)),
        call(torch.unsqueeze, x, d.int(-5, 4)),
        call(torch.squeeze, x[:, :1], 1),
        call(torch.roll, x, d.ints(2, -9, 9), (2, 3)),
        call(torch.roll, x, d.int(-5, 5)),
        call(torch.cat, [x, d.normal(*x.shape)], d.dim(x)),
        call(torch.stack, [x, d.normal(*x.shape)], d.int(-5, 4)),
        call(torch.chunk, x, d.int(1, 4), d.dim(x)),
        call(torch.split, x, d.int(1, 4), d.dim(x)),
        call(torch.tensor_split, x, d.of(2, 3, (1, 2), (1, 5)), d.dim(x)),
        call(torch.narrow, x, 2, 1, h - 2),
        call(method("repeat"), x, d.ints(4, 0, 2)),
        call(torch.tile, x, d.ints(2, 1, 2)),
        call(method("expand"), x[:, :1], -1, 3, h, w),
        call(torch.rot90, x, d.int(-3, 3), (2, 3)),
        call(torch.repeat_interleave, x, d.int(1, 3), dim=d.dim(x)),
        call(torch.unflatten, x, 1, (c, 1)),
        call(method("unfold"), x, d.int(2, 3), d.int(1, 3), d.int(1, 2)),
        call(torch.broadcast_to, x, (2, n, c, h, w)),
        call(torch.pixel_shuffle, d.normal(n, 4, h, w), 2),
        call(torch.pixel_unshuffle, d.normal(n, c, 2 * h, 2 * w), 2),
        call(torch.index_select, x, d.dim(x), d.whole(0, 1, 3)),
        call(torch.select, x, d.dim(x), 0),
        call(torch.take_along_dim, x, x.argsort(1), 1),
        call(torch.gather, x, 1, x.argsort(1)),
    )


def products(d: Draw) -> Call:
    """A product with an image."""
    x = d.image()
    n, c, h, w = x.shape
    return d.of(
        call(F.linear, x, d.normal(5, w), d.of(None, d.normal(5))),
        call(torch.matmul, x, d.normal(w, 2)),
        call(torch.matmul, x, d.normal(n, c, w, 3)),
        call(torch.matmul, d.normal(2, h), x),
        call(torch.einsum, "nchw,cd->ndhw", x, d.normal(c, 2)),
        call(torch.einsum, "nchw,nchw->nc", x, d.normal(*x.shape)),
        call(torch.einsum, "nchw,nkhw->nck", x, d.normal(n, 2, h, w)),
        call(torch.bmm, x[:, 0], d.normal(n, w, 3)),
        call(F.scaled_dot_product_attention, x, d.normal(n, c, 5, w), d.normal(n, c, 5, w)),
        call(F.cosine_similarity, x, d.normal(*x.shape), dim=d.dim(x)),
        call(F.bilinear, x, x * 2, d.normal(2, w, w)),
        call(torch.tensordot, x, d.normal(w, 2), 1),
        call(F.pairwise_distance, x, d.normal(*x.shape)),
    )


def odd_calls(d: Draw) -> Call:
    """Calls that return something else than tensors, or that models make now and then."""
    x = d.image()
    mask = x > 0
    return d.of(
        call(method("tolist"), x),
        call(torch.numel, x),
        call(method("size"), x, 2),
        call(torch.allclose, x, x * 1.0),
        call(torch.equal, x, x + 0.0),
        call(torch.where, mask, x, d.of(0.0, d.normal(*x.shape))),
        call(method("masked_fill"), x, mask, 2.5),
        call(torch.nan_to_num, x / (x > 0)),
        call(method("to"), x, torch.float32),
        call(method("type_as"), x, torch.zeros(1)),
        call(method("item"), x.sum()),
        call(bool, x.sum() > 0),
        call(torch.histc, x, 5, -1.0, 1.0),
        call(torch.bincount, mask.long().flatten()),
        call(torch.tril, x, d.int(-2, 2)),
        call(torch.triu, x, d.int(-2, 2)),
        call(F.one_hot, d.whole(0, 4, 2, 5, 6), 4),
        call(F.glu, x.repeat(1, 2, 1, 1), 1),
        call(F.embedding, d.whole(0, 6, 2, 5, 7), d.normal(6, 3)),
        call(F.prelu, x, d.normal(3)),
        call(F.prelu, x, d.normal(1)),
        call(F.channel_shuffle, x, 3),
        call(torch.lerp, x, d.normal(*x.shape), 0.3),
        call(torch.std_mean, x),
        call(torch.searchsorted, d.normal(9).sort()[0], x),
        call(torch.bucketize, x, d.normal(9).sort()[0]),
        call(torch.cdist, x, d.normal(*x.shape)),
        call(F.gumbel_softmax, x, dim=1),
        call(F.dropout, x, 0.4),
        call(F.dropout2d, x, 0.4),
        call(torch.bernoulli, x.sigmoid()),
        call(torch.rand_like, x),
        call(torch.randn_like, x),
        call(torch.meshgrid, x[0, 0, 0], d.normal(4), indexing=d.of("ij", "xy")),
        call(len, x),
        call(list, x[:, 0]),
        call(torch.complex, x, d.normal(*x.shape)),
        call(torch.view_as_complex, d.normal(2, 3, 5, 2)),
    )


CALLS: dict[str, Callable[[Draw], Call]] = {
    "getitem": indexed,
    "setitem": written,
    "write to a slice": in_slice,
    "operators": binary,
    "reductions": reduced,
    "along a dim": one_of_all,
    "shapes": shaped,
    "products": products,
    "odd calls": odd_calls,
}
"""By name."""
