"""Python's and torch's protocols for tensors: membership, reversal, result types, at least so many dims."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.shard.shape_probes import result_for
from mural.shard.table import register
from mural.shard.tensor import local_of


@register("attribute", "__contains__")
def contains(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a value is anywhere in the whole tensor."""
    x, element = args
    if not isinstance(element, (Tensor, Number)):
        raise RuntimeError(f"Tensor.__contains__ only supports Tensor or scalar, but you passed in a {type(element)}.")
    return bool((x == element).any())


@register("view", "__reversed__")
def reversed_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor with its first dim reversed, which is what Python iterates over."""
    return args[0].flip(0)


@register("attribute", "is_same_size")
def is_same_size(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors have the same shape."""
    return tuple(args[0].shape) == tuple(args[1].shape)


@register("attribute", "result_type")
def result_type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """The type that a pointwise operation on these would have."""
    return func(*pytree.tree_map(local_of, args), **pytree.tree_map(local_of, kwargs))


@register("view", "atleast_1d", "atleast_2d", "atleast_3d")
def at_least(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors with new dims of extent 1 if they have fewer; torch itself says where, on meta tensors."""
    tensors: Any = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    made = tuple(t.reshape(result_for(func, t.shape).shape) for t in tensors)
    return made[0] if len(args) == 1 and isinstance(args[0], Tensor) else made


@register("view", "H.__get__", "mH.__get__", "adjoint")
def adjoint(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The conjugate transpose of the last two dims."""
    x: Tensor = args[0]
    result_for(func, (2,) * x.ndim)  # refuses what torch refuses
    turned = x.transpose(-2, -1)
    return turned.conj() if x.is_complex() else turned
