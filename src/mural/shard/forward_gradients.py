"""`torch.autograd.grad` inside a forward on several ranks: the gradient of a plain tensor is that of all ranks.

    penalty = (x * scale).square().mean()                  every rank has its copy of the penalty
    (g,) = torch.autograd.grad(penalty, scale)             what the copies tell about this rank's scale, a part

After the backward of the loss, a parameter has the mean over the ranks. So has a forward that asks for it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.ranks import Mesh
from mural.shard.gradient_scale import true_gradient
from mural.shard.layout import Layout

_engine: Any = torch.autograd
ENGINE = "_engine_run_backward"
"""What all of torch's ways back go through, whatever they are imported as."""
_meshes: list[Mesh] = []
"""The mesh of the forward that runs on several ranks, unless pieces are differentiated."""


@contextmanager
def whole_gradients(mesh: Mesh) -> Generator[None]:
    """A block of a forward, in which gradients of plain tensors are those of all ranks."""
    if mesh.replicas == 1:
        yield
        return
    plain = getattr(_engine, ENGINE)

    def run(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad") or not _meshes:
            return plain(outputs, *args, **kwargs)
        if args[2] and any(map(is_ours, nodes_of(outputs))):
            raise UnsupportedOp(
                "torch.autograd.grad(create_graph=True) in a forward on several ranks: second derivatives through "
                "messages between ranks are not supported"
            )
        with of_pieces():  # what backward itself differentiates is another matter
            found = plain(outputs, *args, **kwargs)
        return tuple(None if grad is None else of_all_ranks(grad) for grad in found)

    _meshes.append(mesh)
    setattr(_engine, ENGINE, run)
    try:
        yield
    finally:
        setattr(_engine, ENGINE, plain)
        _meshes.clear()


@contextmanager
def of_pieces() -> Generator[None]:
    """A block in which gradients are those of pieces of sharded tensors, for a rule that knows their scale."""
    before = [*_meshes]
    _meshes.clear()
    try:
        yield
    finally:
        _meshes.extend(before)


def of_all_ranks(grad: Tensor) -> Tensor:
    """The gradient of a plain tensor, in a forward on several ranks."""
    if not _meshes:
        return grad
    nothing = (None,) * grad.ndim
    return true_gradient(grad, Layout(_meshes[-1], tuple(grad.shape), nothing, nothing, ()))


def nodes_of(tensors: Sequence[Tensor]) -> Generator[Any]:
    """All nodes that backward from some tensors may go through."""
    todo, seen = [tensor.grad_fn for tensor in tensors], set[Any]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def is_ours(node: Any) -> bool:
    """Whether a node is of one of mural's Functions."""
    return str(getattr(getattr(type(node), "_forward_cls", None), "__module__", "")).startswith("mural.")
