"""Attributes of a sharded tensor, such as the sizes of the whole tensor, and new tensors like it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import UnsupportedOp
from mural.shard.gradient_scale import require_gradient
from mural.shard.layout import Layout
from mural.shard.ops.pointwise.elementwise import check_writable
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor, local_of, replicated

GLOBAL = """
shape.__get__ ndim.__get__ dtype.__get__ device.__get__ layout.__get__ is_cuda.__get__ is_cpu.__get__ is_meta.__get__
is_sparse.__get__ is_quantized.__get__ is_nested.__get__ is_mkldnn.__get__ is_xla.__get__ is_mps.__get__ is_xpu.__get__
is_sparse_csr.__get__ is_vulkan.__get__ is_ipu.__get__ is_maia.__get__ is_mtia.__get__ names.__get__ itemsize.__get__
size numel nelement dim ndimension is_floating_point is_complex is_signed element_size get_device is_conj
is_neg is_inference __len__ __hash__ __dir__ nbytes.__get__
"""
LOCAL = """
is_leaf.__get__ grad_fn.__get__ requires_grad.__get__ retains_grad.__get__ _version.__get__
"""


@register("attribute", *GLOBAL.split())
def of_the_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A property of the global tensor, which the wrapper itself has."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@register("attribute", *LOCAL.split())
def of_the_piece(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A property that the pieces have, the same on every rank."""
    return func(args[0].carrier, *args[1:], **kwargs)


@register(
    "attribute",
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "tolist",
    "numpy",
    "__array__",
)
def to_python(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A Python value, of a tensor that is whole on every rank or of a single position."""
    x: ShardedTensor = args[0]
    if x.placement.cut_dims and x.numel() != 1:
        raise UnsupportedOp(f"{name_of(func)} of a sharded tensor of shape {tuple(x.shape)}: call .full() first")
    return func(x.full(), *args[1:], **kwargs)


@register("attribute", "_nested_tensor_from_mask_left_aligned")
def no_nested_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """False: torch's encoder asks this before it takes a path that is only for plain tensors."""
    return False


@register("attribute", "__format__")
def formatted(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The tensor in an f-string."""
    return format(repr(args[0]), *args[1:])


@register("attribute", "detach", "data.__get__")
def detach(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The same piece without its history."""
    return ShardedTensor(args[0].local.detach(), args[0].placement, args[0].aliased)


@register("attribute", "detach_")
def detach_inplace(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Drop the history of this tensor, in place."""
    check_writable(args[0], "detach_")
    args[0].local.detach_()
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.requires_grad_(args[0], False)
    return args[0]


@register("attribute", "__deepcopy__")
def copy_deep(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A copy of a leaf with its gradient."""
    x, memo = args
    if id(x) in memo:
        return memo[id(x)]
    if not x.local.is_leaf:
        raise RuntimeError("deepcopy works for sharded tensors made by the user (leaves): .detach() it first")
    copy = ShardedTensor(x.local.detach().clone(), x.placement)
    if x.local.requires_grad:
        copy.requires_grad_()
    if x.local.grad is not None:
        copy.local.grad = deepcopy(x.local.grad)
    memo[id(x)] = copy
    return copy


@register("attribute", "is_contiguous")
def is_contiguous(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the pieces are contiguous, the same on all ranks: if a thin piece cannot tell, views are not."""
    x: ShardedTensor = args[0]
    return not x.local._is_view() if x.placement.thin else func(x.local, *args[1:], **kwargs)


@register("attribute", "contiguous")
def contiguous(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The tensor in one memory format; a copy if a piece cannot tell whether torch would copy."""
    x: ShardedTensor = args[0]
    if x.local._is_view() or x.placement.thin:
        order = kwargs.get("memory_format", args[1] if len(args) > 1 else torch.contiguous_format)
        return ShardedTensor(x.local.clone(memory_format=order), x.placement, "contiguous")
    local = func(x.local, *args[1:], **kwargs)
    return x if local is x.local else ShardedTensor(local, x.placement)


@register("attribute", "to", "cpu", "cuda", "type_as", "clone", "pin_memory")
def converted(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor with another type, device or memory format."""
    plain = pytree.tree_map(local_of, (args[1:], kwargs))
    x = args[0]
    if not isinstance(x, ShardedTensor):
        return func(x, *plain[0], **plain[1])
    local = func(x.local, *plain[0], **plain[1])
    return x if local is x.local else ShardedTensor(local, x.placement)


@register("creation", "zeros_like", "ones_like", "empty_like", "full_like")
def like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A new tensor in the same layout."""
    wanted = kwargs.pop("requires_grad", False)
    made = ShardedTensor(func(args[0].local, *args[1:], **kwargs), args[0].placement)
    return require_gradient(made) if wanted else made


@register("creation", "new_empty", "new_zeros", "new_ones", "new_full")
def new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A new tensor of a global shape: cut where an extent is that of a cut dim, else replicated."""
    x, *rest = args
    size, wanted = kwargs.pop("size", None), kwargs.pop("requires_grad", False)
    if size is None:
        size, *rest = (rest[0], *rest[1:]) if rest and not isinstance(rest[0], int) else (tuple(rest),)
    layout = x.placement
    shape = tuple(int(n) for n in size)
    if len(shape) != layout.ndim:
        made = replicated(func(x.local, shape, *rest, **kwargs), layout)
        return made.requires_grad_() if wanted else made
    cuts = tuple(c if n == g else None for c, n, g in zip(layout.cuts, shape, layout.shape, strict=True))
    placed = Layout(layout.mesh, shape, layout.axes, cuts, layout.images)
    made = ShardedTensor(func(x.local, placed.local_shape, *rest, **kwargs), placed)
    return require_gradient(made) if wanted else made


@register("creation", "new_tensor")
def new_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A new plain tensor from data, of the same type and device."""
    return func(args[0].local, *args[1:], **kwargs)
