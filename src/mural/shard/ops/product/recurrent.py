"""Recurrent layers and cells: sequences are independent, so the batch may be cut, along any axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import UnsupportedOp
from mural.shard.folds.regroup import Folds, spans
from mural.shard.folds.reshape import on_settled, settled
from mural.shard.folds.underneath import folded
from mural.shard.layout import Layout
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.windowed.data_windows import part_at
from mural.shard.table import name_of, register, register_folded
from mural.shard.tensor import ShardedTensor, run_replicated, sharded_in, unfolded

LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = tuple(f"{name}_cell" for name in LAYERS)
OPTIONS = ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
PACKED = (
    "a PackedSequence of a sharded tensor: its sequences are interleaved, so that it cannot be cut. Give the layer "
    "padded sequences, or call .full() first"
)


def check_whole(x: ShardedTensor, dims: dict[int, str], name: str) -> None:
    """Raise if a dim that a layer steps along or sums over is cut."""
    for dim, what in dims.items():
        a, b = spans(x.folds)[dim] if x.folds else (dim, dim + 1)
        if any(x.placement.is_cut(d) for d in range(a, b)):
            raise UnsupportedOp(
                f"{name} along dim {dim} (the {what}) of a sharded tensor of shape {tuple(x.shape)}, which is cut: "
                f"only the batch may be. Call .full() first if the tensor fits on one rank, or choose a plan that does "
                f"not cut that dim"
            )


class MergedBatch:
    """The batch of a layer's input, which may merge several dims of the placement, and this rank's part of it."""

    def __init__(self, x: ShardedTensor, dim: int):
        self.placement, self.like = x.placement, x.local
        self.folds: Folds = x.folds or (1,) * x.ndim
        self.dims = range(*spans(self.folds)[dim])

    def layout(self, before: Sequence[int], after: Sequence[int]) -> Layout:
        """The layout of a tensor with whole dims before and after the batch."""
        dims: list[int | None] = [*[None] * len(before), *self.dims, *[None] * len(after)]
        return self.placement.pick(dims, (*before, *(self.placement.shape[d] for d in self.dims), *after))

    def state(self, value: Tensor, dim: int) -> Tensor:
        """The part of a state that belongs to this rank's sequences; `dim` is the batch, as one dim."""
        layout = self.layout(value.shape[:dim], value.shape[dim + 1 :])
        local = part_at(value.reshape(layout.shape), layout, "the state of a recurrent layer")
        return local.flatten(dim, dim + len(self.dims) - 1)

    def whole(self, local: Tensor, dim: int) -> ShardedTensor:
        """The sharded tensor of the results of this rank's sequences, with the batch at `dim`."""
        layout = self.layout(local.shape[:dim], local.shape[dim + 1 :])
        opened = local.unflatten(dim, [layout.local_shape[dim + i] for i in range(len(self.dims))])
        folds = (*[1] * dim, len(self.dims), *[1] * (local.ndim - dim - 1))
        return folded(ShardedTensor(opened, layout), folds)


def some(value: Tensor, dim: int, anchor: Tensor) -> Tensor:
    """The batch itself; for an empty one, a sequence of zeros instead, connected to it in the graph."""
    if value.shape[dim]:
        return value
    shape = [1 if d == dim else n for d, n in enumerate(value.shape)]
    return value.new_zeros(shape) + value.sum() * 0 + anchor.sum() * 0


@register_folded(*LAYERS)
@register("along a dim", *LAYERS)
def layers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A recurrent layer on this rank's sequences."""
    name = name_of(func)
    if len(args) > 3 and isinstance(args[3], (list, tuple)):  # data, batch sizes, state, weights, …
        return of_packed(func, args, kwargs)
    x, hx, weights, *options = bound(args, kwargs, ("input", "hx", "params", *OPTIONS))
    biases, count, dropout, train, both, batch_first = options
    if not isinstance(x, ShardedTensor):
        raise UnsupportedOp(f"{name} takes a sharded input where its state or weights are: call .full() on those")
    at, along = (0, 1) if batch_first else (1, 0)
    check_whole(x, {along: "sequence", 2: "features"}, name)
    if any(n > 1 for d, n in enumerate(x.folds) if d != at):
        return on_settled(func, args, kwargs)
    states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
    if not (train and dropout > 0 and count > 1):
        return layer(func, x, states, weights, tuple(options))
    # Layer by layer, so that dropout between them is drawn for the whole batch.
    each, several = len(weights) // count, 2 if both else 1
    found: list[Sequence[Tensor]] = []
    out: Any = x
    for i in range(count):
        own = [s[i * several : (i + 1) * several] for s in states]
        options = (biases, 1, 0.0, train, both, batch_first)
        out, *last = layer(func, out, own, weights[i * each : (i + 1) * each], options)
        out = F.dropout(out, dropout) if i < count - 1 else out
        found.append(last)
    return out, *(torch.cat(list(parts)) for parts in zip(*found, strict=True))


def layer(
    func: Callable[..., Any], x: ShardedTensor, states: Sequence[Tensor], weights: Sequence[Tensor],
    options: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """The output and the last states of a layer of which only the batch is cut."""
    at = 0 if options[-1] else 1
    batch = MergedBatch(x, at)
    piece = unfolded(x).local.flatten(at, at + len(batch.dims) - 1)
    here = piece.shape[at]
    inputs = some(piece, at, piece)
    mine = [some(batch.state(s, 1), 1, piece) for s in states]
    out, *last = func(inputs, mine if name_of(func) == "lstm" else mine[0], list(weights), *options)
    return batch.whole(out.narrow(at, 0, here), at), *(batch.whole(s.narrow(1, 0, here), 1) for s in last)


@register_folded(*CELLS)
@register("along a dim", *CELLS)
def cells(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One step of a recurrent cell on this rank's batch."""
    name = name_of(func)
    x, hx, *weights = bound(args, kwargs, ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh"), None, None)
    if not isinstance(x, ShardedTensor):
        raise UnsupportedOp(f"{name} takes a sharded input where its state or weights are: call .full() on those")
    check_whole(x, {1: "features"}, name)
    if any(n > 1 for n in x.folds[1:]):
        return on_settled(func, args, kwargs)
    batch = MergedBatch(x, 0)
    piece = unfolded(x).local.flatten(0, len(batch.dims) - 1)
    several = isinstance(hx, (tuple, list))
    mine = [some(batch.state(s, 0), 0, piece) for s in (hx if several else [hx])]
    result = func(some(piece, 0, piece), mine if several else mine[0], *weights)
    made = tuple(batch.whole(s.narrow(0, 0, piece.shape[0]), 0) for s in (result if several else [result]))
    return made if several else made[0]


@register_folded("_pack_padded_sequence")
@register("along a dim", "_pack_padded_sequence")
def of_packed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sequences of several lengths in one list: refused, unless every rank holds them all."""
    if any(t.placement.cut_dims for t in sharded_in(args, kwargs)):
        raise UnsupportedOp(f"{name_of(func)}: {PACKED}")
    return run_replicated(func, *pytree.tree_map(settled, (args, kwargs)))
