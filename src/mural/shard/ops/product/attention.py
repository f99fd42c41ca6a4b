"""Attention over all positions: keys and values travel to the queries, or few queries to the keys.

Gathered keys and values move S·(E + Ev) numbers per head, as much as a ring would, and torch's own kernel does the
work. With few queries for many keys, every rank attends to its own keys instead, and the sums of weights and weighted
values are merged: then the queries and P partial results move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.autocasting import is_autocast, without_autocast
from mural.shard.folds.underneath import common_factors, opened
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.product.products import (
    Label,
    Labelled,
    Placed,
    layout_for,
    local_part,
    merge_dims,
    pieces_of,
    placed,
)
from mural.shard.ops.random.lattice import merged_positions
from mural.shard.relayout import merged, stacked
from mural.shard.table import register, register_folded
from mural.shard.tensor import ShardedTensor

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
HEADS = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip


@register("attention", "scaled_dot_product_attention")
@register_folded("scaled_dot_product_attention")
def attention(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """softmax(q·kᵀ · scale + mask)·v with all keys of the whole image."""
    q, k, v, mask, dropout, causal, scale, grouped = bound(args, kwargs, NAMES, None, 0.0, False, None, False)
    mask = mask.unsqueeze(0) if mask is not None and mask.ndim == 1 else mask
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise RuntimeError(f"attention: shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} do not fit")
    if causal and mask is not None:
        raise RuntimeError("attention: give attn_mask or is_causal=True, not both")
    if dropout:
        if grouped or causal:
            raise UnsupportedOp("attention with dropout and enable_gqa or is_causal: give an attn_mask, or dropout_p=0")
        return dropped(q, k, v, mask, dropout, q.shape[-1] ** -0.5 if scale is None else scale)
    grouped = grouped and q.shape[-3] != k.shape[-3]
    operands = labelled(q, k, v, mask, grouped)
    factors = common_factors(operands)
    apart = [(opened(x, labels, factors), labels) for x, labels in operands]
    longest = max((x for x, _ in operands[:3]), key=lambda x: x.ndim)
    out: list[Label] = [*(-d for d in range(longest.ndim - 2, 0, -1)), "query", "value"]
    if not causal and not grouped and (at := keys_stay(apart, out, factors)) is not None:
        return by_parts(apart, out, factors, at, q.shape[-1] ** -0.5 if scale is None else scale)
    at = placed(apart, out, factors, summed=False)
    like = next(x for x, _ in apart if isinstance(x, ShardedTensor)).placement
    parts = local_parts(apart, factors, at)
    bias: Tensor | None = parts[3] if mask is not None else None
    if causal:
        layout = layout_for(like, ["query"], factors, at)
        rows = merged_positions(layout.box, layout.shape).to(q.device)
        bias = rows[:, None] >= torch.arange(k.shape[-2], device=q.device)
    local = func(*parts[:3], attn_mask=bias, scale=scale, enable_gqa=grouped)
    return wrapped(local, layout_for(like, out, factors, at), [len(factors[label]) for label in out])


def labelled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> list[Labelled]:
    """The operands with labels; batch dims are numbered from the last."""

    def batch(x: Tensor, heads: Label) -> list[Label]:
        found: list[Label] = [-d for d in range(x.ndim - 2, 0, -1)]
        return [heads if d == -1 else d for d in found]

    of_k = batch(k, "key heads" if grouped else -1)
    found: list[Labelled] = [
        (q, [*batch(q, -1), "query", "in"]),
        (k, [*of_k, "key", "in"]),
        (v, [*of_k, "key", "value"]),
    ]
    return found if mask is None else [*found, (mask, [*batch(mask, -1), "query", "key"])]


def local_parts(apart: Sequence[Labelled], factors: dict[Label, tuple[int, ...]], at: Placed) -> list[Tensor]:
    """This rank's part of every operand, with one dim per label."""
    like = next(x for x, _ in apart if isinstance(x, ShardedTensor)).placement
    return [
        merge_dims(
            local_part(x, layout_for(like, labels, factors, at), "attention"), [len(factors[label]) for label in labels]
        )
        for x, labels in apart
    ]


def wrapped(local: Tensor, layout: Any, counts: list[int]) -> ShardedTensor:
    """A piece with one dim per label, as a sharded tensor."""
    folds = tuple(counts) if any(n > 1 for n in counts) else ()
    return ShardedTensor(local.reshape(layout.local_shape), layout, "", folds)


def keys_stay(apart: Sequence[Labelled], out: Sequence[Label], factors: dict[Label, tuple[int, ...]]) -> Placed | None:
    """The layouts if keys and values do not move; None if it is cheaper to move them."""
    (k, of_k), (v, _) = apart[1], apart[2]
    if not isinstance(k, ShardedTensor) or not isinstance(v, ShardedTensor):
        return None
    cut: Placed = {
        piece: (axis, cuts)
        for piece, axis, cuts in zip(pieces_of(of_k, factors), k.placement.axes, k.placement.cuts, strict=True)
        if piece[0] == "key" and cuts is not None and cuts.parts > 1
    }
    parts = prod(cuts.parts for _, cuts in cut.values() if cuts is not None)
    queries, keys, width, deep = (prod(factors[name]) for name in ("query", "key", "in", "value"))
    if not cut or queries * (width + parts * (deep + 1)) >= keys * (width + deep):
        return None
    taken = {axis for axis, _ in cut.values()}
    rest = placed(apart, [label for label in out if label != "query"], factors, summed=False)
    return {piece: place for piece, place in rest.items() if place[0] not in taken} | cut


def by_parts(
    apart: Sequence[Labelled], out: Sequence[Label], factors: dict[Label, tuple[int, ...]], at: Placed, scale: float
) -> ShardedTensor:
    """Attention of all queries to this rank's keys, merged over the ranks with the largest score of all."""
    like = next(x for x, _ in apart if isinstance(x, ShardedTensor)).placement
    q, k, v, *mask = local_parts(apart, factors, at)
    dtype = v.dtype
    if is_autocast(v.device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(v.device.type)
    wide = torch.promote_types(dtype, torch.float32)
    axes = [axis for piece, (axis, _) in at.items() if piece[0] == "key" and axis]
    with without_autocast(v.device):
        q, k, v = (part.to(dtype).to(wide) for part in (q, k, v))
        scores = (q * scale) @ k.transpose(-2, -1)
        if mask:
            scores = scores.masked_fill(~mask[0], float("-inf")) if mask[0].dtype == torch.bool else scores + mask[0]
        lowest = scores.new_full((*scores.shape[:-1], 1), float("-inf"))
        top = torch.cat((scores.detach(), lowest), -1).amax(-1, keepdim=True)
        best = stacked(top, like.mesh, axes, "attention").amax(0)
        shares = (scores - torch.where(best == float("-inf"), 0.0, best)).exp()
        total = merged(torch.cat((shares @ v, shares.sum(-1, keepdim=True)), -1), like.mesh, axes, "attention")
        weight = total[..., -1:]
        local = (total[..., :-1] / torch.where(weight == 0, 1.0, weight)).to(dtype)
    return wrapped(local, layout_for(like, out, factors, at), [len(factors[label]) for label in out])


def dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float) -> Tensor:
    """Attention with dropout of the scores, which are computed whole so that every grid draws the same mask."""
    scores = torch.matmul(q * scale, k.transpose(-2, -1))
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(F.dropout(scores.softmax(-1), dropout, True), v)


@register("attention", "multi_head_attention_forward")
@register_folded("multi_head_attention_forward")
def heads(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """What `nn.MultiheadAttention` computes, from its projections and attention."""
    defaults = (True, None, True, None, False, None, None, None, None, None, True, False)
    given: dict[str, Any] = dict(zip(HEADS, bound(args, kwargs, HEADS, *defaults), strict=True))
    for name in ("bias_k", "bias_v", "static_k", "static_v"):
        if given[name] is not None:
            raise UnsupportedOp(f"nn.MultiheadAttention with {name} for sharded tensors")
    if given["add_zero_attn"] or given["query"].ndim != 3:
        raise UnsupportedOp("nn.MultiheadAttention with add_zero_attn, or without a batch dim, for sharded tensors")
    q, k, v = projected(given)
    count: int = given["num_heads"]
    q, k, v = (x.unflatten(-1, (count, x.shape[-1] // count)).permute(1, 2, 0, 3) for x in (q, k, v))
    mask = combined_mask(given, (q.shape[0], count, q.shape[2], k.shape[2]), q.dtype)
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights: Tensor | None = None
    if given["need_weights"]:
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout, True) if dropout else weights
        y = torch.matmul(weights, v)
        weights = weights.mean(1) if given["average_attn_weights"] else weights
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    y = y.permute(2, 0, 1, 3).flatten(2)
    return F.linear(y, given["out_proj_weight"], given["out_proj_bias"]), weights


def projected(given: dict[str, Any]) -> list[Tensor]:
    """Queries, keys and values, (positions, batch, width)."""
    inputs, bias = [given[name] for name in ("query", "key", "value")], given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        if inputs[0] is inputs[1] is inputs[2]:
            return list(F.linear(inputs[0], given["in_proj_weight"], bias).chunk(3, -1))
        weights = given["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def combined_mask(given: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """The attention mask and the padding mask added up as scores (batch, heads, queries, keys)."""

    def scores(mask: Tensor) -> Tensor:
        zeros = torch.zeros_like(mask, dtype=dtype)
        return zeros.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask.to(dtype)

    found: Tensor | None = None
    if (mask := given["attn_mask"]) is not None:
        found = scores(mask)
        found = found.reshape(shape) if found.ndim == 3 else found
    if (padding := given["key_padding_mask"]) is not None:
        more = scores(padding)[:, None, None, :]
        found = more if found is None else found + more
    return found
