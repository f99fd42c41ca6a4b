"""Permutations and reshapes: data stay where they are wherever the cut dims stay apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Cuts
from mural.shard.layout import Layout
from mural.shard.ops.arguments import bound, dim_of
from mural.shard.ops.indexing import unsqueezed
from mural.shard.ops.pointwise import common_layout, piece_of
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor, gather, moves_data


@register("view", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t")
def permute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The dims in another order; torch itself says in which, on a tensor whose extents are the dims' numbers."""
    x = args[0]
    probe = torch.empty_strided((2,) * x.ndim, tuple(range(1, x.ndim + 1)), device="meta")
    order = [s - 1 for s in func(probe, *args[1:], **kwargs).stride()]
    return permuted(x, order)


def permuted(x: ShardedTensor, order: Sequence[int]) -> ShardedTensor:
    """The dims in that order."""
    layout = x.placement.pick(order, [x.placement.shape[d] for d in order])
    return ShardedTensor(x.local.permute(*order), layout, x.aliased)


@register("view", "T.__get__", "mT.__get__")
def transposed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """`.T` and `.mT`."""
    order = list(range(args[0].ndim))
    if getattr(func, "__self__", None) is torch.Tensor.mT:
        return permuted(args[0], [*order[:-2], order[-1], order[-2]])
    return permuted(args[0], order[::-1])


@register("view", "unsqueeze")
def unsqueeze(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A new dim of extent 1."""
    x, dim = bound(args, kwargs, ("input", "dim"))
    return unsqueezed(x, dim_of(dim, x.ndim + 1, "unsqueeze"))


@register("view", "squeeze")
def squeeze(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without dims of extent 1."""
    x = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else tuple(range(x.ndim)))
    chosen = [dim_of(d, x.ndim, "squeeze") for d in ((dims,) if isinstance(dims, int) else dims)]
    gone = {d for d in chosen if x.shape[d] == 1}
    whole = gather(x, sorted(gone), "squeeze")
    keep = [d for d in range(x.ndim) if d not in gone]
    layout = whole.placement.pick(keep, [x.shape[d] for d in keep])
    local = whole.local.squeeze(tuple(sorted(gone)))
    lost = "squeeze" if moves_data(x, whole.placement) else x.aliased
    return ShardedTensor(local, layout, lost) if keep else local


def groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of old dims and new dims with equal products, as short as possible.

    >>> groups((2, 3, 4, 5), (2, 12, 5))
    [([0], [0]), ([1, 2], [1]), ([3], [2])]
    """
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(left), j + len(right)
        while (a := prod(old[d] for d in left)) != (b := prod(new[d] for d in right)) or not left or not right:
            if i >= len(old) and j >= len(new):
                break
            if (a <= b and i < len(old)) or j >= len(new):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        found.append((left, right))
    return found


def regrouped(layout: Layout, shape: Sequence[int]) -> tuple[Layout | None, list[int]]:
    """The layout after a reshape; or None and the dims to gather first.

    A cut dim survives where it comes first (apart from dims of extent 1) on both sides of its group and
    every bound falls between two positions of the new dim.
    """
    axes: list[str | None] = [None] * len(shape)
    cuts: list[Cuts | None] = [None] * len(shape)
    lost: list[int] = []
    for left, right in groups(layout.shape, shape):
        named = [d for d in left if layout.axes[d] is not None]
        wide = [d for d in left if layout.shape[d] != 1]
        targets = [d for d in right if shape[d] != 1] or right[:1]
        for d in named:
            cut = layout.cuts[d]
            first = d == (wide or left)[0]
            if not first or not targets:
                lost += [d] if cut is not None else []
                continue
            inner_old = prod(layout.shape[e] for e in left if e > d)
            inner_new = prod(shape[e] for e in right if e > targets[0])
            if cut is None:
                axes[targets[0]] = layout.axes[d] if len(wide) <= 1 and len(targets) == 1 else None
            elif inner_new and all(b * inner_old % inner_new == 0 for b in cut.bounds):
                axes[targets[0]] = layout.axes[d]
                cuts[targets[0]] = Cuts(tuple(b * inner_old // inner_new for b in cut.bounds), cut.owners)
            else:
                lost.append(d)
    if lost:
        return None, lost
    return replace(layout, shape=tuple(shape), axes=tuple(axes), cuts=tuple(cuts)), []


def reshaped(x: ShardedTensor, shape: Sequence[int], name: str) -> ShardedTensor | Tensor:
    """The tensor under another shape; cut dims that would merge or split are gathered first."""
    layout, lost = regrouped(x.placement, shape)
    aliased = x.aliased
    if layout is None:
        whole = gather(x, lost, name)
        aliased = name if moves_data(x, whole.placement) else aliased
        layout, still = regrouped(whole.placement, shape)
        if layout is None:
            whole, (layout, _) = (
                gather(whole, still, name),
                regrouped(gather(whole, still, name).placement, shape),
            )
        x = whole
    if layout is None:
        raise UnsupportedOp(f"{name} from {tuple(x.shape)} to {tuple(shape)} with cuts {x.placement.cuts}")
    local = x.local.reshape(layout.local_shape)
    return ShardedTensor(local, layout, aliased) if layout.ndim else local


@register("view", "reshape", "view", "flatten", "unflatten", "reshape_as", "view_as", "ravel")
def reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another shape; torch itself says which, on a tensor without memory."""
    x = args[0]
    name = name_of(func)
    if any(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values())):
        raise UnsupportedOp("view(dtype) of a sharded tensor")
    probe = torch.empty(tuple(x.shape), device="meta")
    others = [torch.empty(tuple(a.shape), device="meta") if isinstance(a, Tensor) else a for a in args[1:]]
    return reshaped(x, tuple(func(probe, *others, **kwargs).shape), name)


@register("view", "expand", "expand_as", "broadcast_to")
def expand(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Dims of extent 1 repeated without memory; like the other tensor where one is given."""
    x = args[0]
    if len(args) > 1 and isinstance(args[1], Tensor):
        layout = common_layout(func, (x, args[1]))
    else:
        probe = func(torch.empty(tuple(x.shape), device="meta"), *args[1:], **kwargs)
        layout = x.placement.pick([None] * (probe.ndim - x.ndim) + list(range(x.ndim)), probe.shape)
        grown = [d for d in range(probe.ndim) if layout.shape[d] != ((1,) * probe.ndim + tuple(x.shape))[x.ndim + d]]
        layout = layout.gathered(grown)
    local = piece_of(x, layout, name_of(func)).expand(layout.local_shape)
    return ShardedTensor(local, layout, x.aliased if isinstance(x, ShardedTensor) else "")
