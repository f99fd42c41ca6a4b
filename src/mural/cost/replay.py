"""Replay: calls of a graph, run again on other tensors, in memory or without."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import UnsupportedOp
from mural.graph import Node
from mural.graph.facts import fact_of
from mural.graph.nodes import Place, Ref


def call(
    node: Node, tensors: Sequence[Tensor], *, inplace: bool = True, instead: Callable[..., Any] | None = None
) -> tuple[Tensor, ...]:
    """The tensors that the call makes of these, on their device; `inplace=False` leaves what it is given as it is.

    `instead` is a function to call in place of the node's.
    """
    func, args, kwargs = node.func, node.args, dict(node.kwargs)
    if func is None:
        raise UnsupportedOp(f"{node.site}: this graph does not know the function of {node.op!r}; capture it again")
    if func is torch.autograd.grad:
        raise UnsupportedOp(
            f"{node.site}: torch.autograd.grad goes back through calls of the forward, so what they keep cannot be "
            f'foreseen: set cuts = "layers", or name the blocks at which stages begin'
        )
    device = tensors[0].device if tensors else torch.get_default_device()
    if not inplace and node.writes:
        func, args, kwargs, clean = beside(node)
        tensors = tensors if clean else [tensor.clone() for tensor in tensors]

    def given(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return tensors[leaf.index]
        return device if isinstance(leaf, torch.device) else leaf

    called, named = pytree.tree_map(given, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Ref))
    with device:
        result = (instead or func)(*called, **named)
    made = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
    # A call that returns nothing gives what it wrote to: by `y[:2] += x`, the slice and all of y.
    return made or tuple(tensors[i] for i in node.returns or range(min(1, len(tensors))))


def beside(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any], bool]:
    """The call that writes its result to new memory, and true; the call as it is, and false, where torch has none."""
    kwargs, args = dict(node.kwargs), node.args
    if kwargs.get("inplace"):
        return node.func, args, kwargs | {"inplace": False}, True
    if node.func is torch.nn.functional.relu and args[1:] == (True,):
        return node.func, args[:1], kwargs, True
    if node.op.endswith("_") and not node.op.startswith("__") and hasattr(Tensor, node.op[:-1]):
        return getattr(Tensor, node.op[:-1]), args, kwargs, True
    return node.func, args, kwargs, fact_of(node).buffers


def tensors_for(node: Node, wanted: Collection[Place], device: torch.device) -> list[Tensor]:
    """Random tensors of the shapes and types that a call is given; those that are wanted need a gradient."""
    found: list[Tensor] = []
    for at, shape, dtype in zip(node.reads, node.input_shapes, node.input_dtypes, strict=True):
        if dtype.is_floating_point and device.type != "meta":
            tensor = torch.rand(shape, device=device).to(dtype)
        else:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        found.append(tensor.requires_grad_(at in wanted))
    return found


def signature(node: Node, wanted: Collection[Place]) -> str:
    """What the time of a call depends on: function, shapes, types, other arguments, and whose gradient is wanted."""
    about = [
        node.op,
        [[list(shape), name_of(dtype), at in wanted] for shape, dtype, at in inputs_of(node)],
        [plain(node.args), plain(node.kwargs)],
    ]
    return json.dumps(about, separators=(",", ":"))


def inputs_of(node: Node) -> list[tuple[tuple[int, ...], torch.dtype, Place]]:
    """Shape, type and origin of each tensor that a call is given."""
    return list(zip(node.input_shapes, node.input_dtypes, node.reads, strict=True))


def name_of(dtype: torch.dtype) -> str:
    """A type's name without the module."""
    return str(dtype).removeprefix("torch.")


def plain(value: Any) -> Any:
    """An argument as JSON can hold it."""
    if isinstance(value, Ref):
        return f"@{value.index}"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
