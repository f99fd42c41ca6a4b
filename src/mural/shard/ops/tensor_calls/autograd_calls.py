"""Gradients of a sharded tensor: required, kept, hooked and differentiated, sharded like it and with the true scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import LayoutError, UnsupportedOp
from mural.shard.forward_gradients import of_all_ranks, of_pieces
from mural.shard.gradient_scale import raw_gradient, replicated_axes, require_gradient, true_gradient
from mural.shard.halo.margin import Margin
from mural.shard.layout import Layout
from mural.shard.ops.pointwise.elementwise import piece_of
from mural.shard.table import KINDS, TABLE, register
from mural.shard.tensor import ShardedTensor, local_of


def read_margin(x: ShardedTensor) -> Margin | None:
    """The margin through which gradients also reach a tensor; without one, all come through its piece from now on."""
    if x.margin is None:
        return None
    x.margin.live = x.margin.live and x.margin.used
    return x.margin if x.margin.used else None


@register("gradient", "requires_grad_", "requires_grad.__set__")
def require_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Turn gradients of a leaf on or off; they arrive with the true scale."""
    return require_gradient(args[0], bool((*args[1:], *kwargs.values(), True)[0]))


@register("gradient", "grad.__get__", "_grad.__get__")
def gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient, sharded like the tensor."""
    x: ShardedTensor = args[0]
    if x.margin is not None and x.margin.grad is not None:
        return ShardedTensor(true_gradient(x.margin.grad, x.placement), x.placement)
    if x.local.grad is None:
        return None
    if x.local.is_leaf:
        return ShardedTensor(x.local.grad, x.placement)
    if replicated_axes(x.placement):
        raise UnsupportedOp("the .grad of an intermediate tensor that several ranks hold: use torch.autograd.grad")
    return ShardedTensor(true_gradient(x.local.grad, x.placement), x.placement)


@register("gradient", "grad.__set__", "grad.__delete__")
def set_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace or clear the gradient."""
    x: ShardedTensor = args[0]
    value: Tensor | None = next(iter(args[1:]), None)
    x.local.grad = None if value is None else piece_of(value, x.placement, "grad")


@register("gradient", "retain_grad")
def retain_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the gradient of an intermediate tensor."""
    if (margin := read_margin(args[0])) is None:
        args[0].local.retain_grad()
    else:
        margin.retain()


@register("gradient", "register_hook")
def register_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a hook with the sharded gradient; it may return another."""
    x, hook = args[0], args[1]
    placement: Layout = x.placement
    leaf = x.carrier.is_leaf

    def on_piece(grad: Tensor) -> Tensor | None:
        true = grad if leaf else true_gradient(grad, placement)
        try:
            changed = hook(ShardedTensor(true, placement))
        except Exception as error:
            placement.mesh.transport.raised(error)
            raise
        if changed is None:
            return None
        piece = piece_of(changed, placement, "hook")
        return piece if leaf else raw_gradient(piece, placement)

    margin = read_margin(x)
    return x.local.register_hook(on_piece) if margin is None else margin.hook(on_piece)


@register("gradient", "register_post_accumulate_grad_hook")
def register_accumulated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a hook with the tensor once its gradient has been accumulated."""
    x, hook = args
    return x.local.register_post_accumulate_grad_hook(lambda _: hook(x))


@register("gradient", "backward")
def backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Differentiate from a sharded result, with a gradient of its shape."""
    x: ShardedTensor = args[0]
    given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False)) | kwargs
    grad = given.pop("gradient", None)
    if grad is None:
        if x.numel() != 1:
            raise LayoutError(f"backward of a sharded tensor of shape {tuple(x.shape)} needs a gradient of its shape")
        grad = torch.ones(x.shape, dtype=x.dtype, device=x.device)
    inputs = given.pop("inputs", None)
    if inputs is not None:
        if any(read_margin(i) for i in pytree.tree_leaves(inputs) if isinstance(i, ShardedTensor)):
            raise UnsupportedOp("backward(inputs=…) of an intermediate tensor: use torch.autograd.grad")
        given["inputs"] = pytree.tree_map(local_of, inputs)
    x.local.backward(raw_gradient(piece_of(grad, x.placement, "backward"), x.placement), **given)


def grad_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad: gradients of sharded inputs are sharded, with the true scale."""
    names = (
        "outputs",
        "inputs",
        "grad_outputs",
        "retain_graph",
        "create_graph",
        "only_inputs",
        "allow_unused",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs = given.pop("outputs")
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    inputs = given.pop("inputs")
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    seeds = given.pop("grad_outputs", None)
    seeds = (seeds,) if isinstance(seeds, Tensor) else seeds or (None,) * len(outputs)
    if given.get("create_graph"):
        raise UnsupportedOp("autograd.grad(create_graph=True): second derivatives of sharded tensors are not supported")
    raw = [
        seed
        if seed is None or not isinstance(out, ShardedTensor)
        else raw_gradient(piece_of(seed, out.placement, "grad"), out.placement)
        for out, seed in zip(outputs, seeds, strict=True)
    ]
    margins = [read_margin(i) if isinstance(i, ShardedTensor) else None for i in inputs]
    carriers = [local_of(i) if m is None else m.extended for i, m in zip(inputs, margins, strict=True)]
    with of_pieces():
        found = func([local_of(o) for o in outputs], carriers, raw, **given)
    own = [g if m is None or g is None else m.homed(g) for g, m in zip(found, margins, strict=True)]
    return tuple(
        ShardedTensor(g if i.carrier.is_leaf else true_gradient(g, i.placement), i.placement)
        if isinstance(i, ShardedTensor) and g is not None
        else of_all_ranks(g)
        if g is not None
        else None
        for i, g in zip(inputs, own, strict=True)
    )


TABLE[torch.autograd.grad] = ("autograd.grad", grad_of)
KINDS["autograd.grad"] = "gradient"
