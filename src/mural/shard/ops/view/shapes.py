"""Permutations, reshapes, quarter turns and broadcasts: data stay where they are if the cut dims stay separate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.folds.reshape import reshaped
from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.ops.pointwise.elementwise import common_layout, piece_of
from mural.shard.ops.view.slices import seen_from, unsqueezed
from mural.shard.relayout import gather, moves_data
from mural.shard.shape_probes import order_after, result_for
from mural.shard.table import TABLE, name_of, register
from mural.shard.tensor import ShardedTensor


@register("view", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t")
def permute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The dims in another order."""
    x = args[0]
    return permuted(x, order_after(func, x.ndim, *args[1:], **kwargs))


def permuted(x: ShardedTensor, order: Sequence[int]) -> ShardedTensor:
    """The dims in that order."""
    layout = x.placement.pick(order, [x.placement.shape[d] for d in order])
    return seen_from(x, ShardedTensor(x.local.permute(*order), layout, x.aliased))


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
    """The tensor without dims of extent 1."""
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


@register("view", "reshape", "view", "flatten", "unflatten", "reshape_as", "view_as", "ravel")
def reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another shape."""
    x = args[0]
    name = name_of(func)
    if any(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values())):
        raise UnsupportedOp("view(dtype) of a sharded tensor")
    made = reshaped(x, tuple(result_for(func, x.shape, *args[1:], **kwargs).shape), name)
    return made if made.ndim else made.local


@register("view", "expand", "expand_as", "broadcast_to")
def expand(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Dims of extent 1 expanded without memory; to the shape of another tensor if one is given."""
    x = args[0]
    if len(args) > 1 and isinstance(args[1], Tensor):
        layout = common_layout(func, (x, args[1]))
    else:
        probe = result_for(func, x.shape, *args[1:], **kwargs)
        layout = x.placement.pick([None] * (probe.ndim - x.ndim) + list(range(x.ndim)), probe.shape)
        grown = [d for d in range(probe.ndim) if layout.shape[d] != ((1,) * probe.ndim + tuple(x.shape))[x.ndim + d]]
        layout = layout.gathered(grown)
    local = piece_of(x, layout, name_of(func)).expand(layout.local_shape)
    return ShardedTensor(local, layout, x.aliased if isinstance(x, ShardedTensor) else "")


@register("view", "view_as_complex", "view_as_real")
def complex_view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Pairs of the last dim as complex numbers, and back."""
    x: ShardedTensor = args[0]
    if name_of(func) == "view_as_complex":
        x = gather(x, (x.ndim - 1,), "view_as_complex")
        layout = x.placement.pick(range(x.ndim - 1), x.shape[:-1])
    else:
        layout = x.placement.pick([*range(x.ndim), None], (*x.shape, 2))
    return ShardedTensor(func(x.local), layout, x.aliased)


@register("view", "rot90")
def rot90(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The plane of two dims turned by k quarters, from the first towards the second."""
    x, k, dims = bound(args, kwargs, ("input", "k", "dims"), 1, (0, 1))
    a, b = (dim_of(d, x.ndim, "rot90") for d in dims)
    if a == b:
        raise RuntimeError(f"rot90 needs two different dims, not {tuple(dims)}")
    if k % 4 == 2:
        return x.flip((a, b))
    if k % 4 == 0:
        return x.clone()
    return x.flip(b).transpose(a, b) if k % 4 == 1 else x.flip(a).transpose(a, b)


def broadcast_all(func: Any, tensors: Sequence[Tensor]) -> tuple[ShardedTensor, ...]:
    """Each tensor expanded without memory to the common shape and layout."""
    layout, name = common_layout(func, tensors), name_of(func)
    pieces = [piece_of(t, layout, name).expand(layout.local_shape) for t in tensors]
    return tuple(ShardedTensor(piece, layout, name) for piece in pieces)


def listed(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors of a call that takes them one by one or in one list."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)


@register("view", "broadcast_tensors")
def broadcast_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors of one shape."""
    return broadcast_all(func, listed(args))


@register("view", "meshgrid")
def meshgrid(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Grids of coordinates: tensor i varies only along dim i; for "xy", the first two along each other's dim."""
    tensors, indexing = listed(args), kwargs.get("indexing") or "ij"
    if indexing not in ("ij", "xy") or any(t.ndim > 1 for t in tensors):
        raise RuntimeError(f"meshgrid takes sequences and indexing 'ij' or 'xy', not {indexing!r}")
    if any(t.ndim == 0 for t in tensors):
        raise UnsupportedOp("meshgrid of sharded sequences and numbers: make the numbers sequences of one")
    order = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        order[:2] = [1, 0]
    raised: list[Tensor] = []
    for tensor, dim in zip(tensors, order, strict=True):
        for d in range(len(tensors)):
            if d != dim:
                tensor = unsqueezed(tensor, d) if isinstance(tensor, ShardedTensor) else tensor.unsqueeze(d)
        raised.append(tensor)
    return broadcast_all(func, raised)


_builtin: Any = torch._C  # torch's stubs leave its submodules out
TABLE[_builtin._VariableFunctions.meshgrid] = ("meshgrid", meshgrid)  # where torch takes the sequences in one list
