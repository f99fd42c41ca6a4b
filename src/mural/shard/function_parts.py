"""Parts: how a plain tensor of this rank is part of a tensor that a custom Function takes, gives or saves.

A plain tensor is the same on every rank: it is a tensor that no axis cuts. So gradients of both have the same scale
(see `gradient_scale.py`): the Function's backward gets the single-device gradient, and what it returns is converted
back to the scale inside backward. For a parameter that is the single-device gradient on every rank, whose mean over the
ranks is itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mural.ranks import Mesh
from mural.shard.folds.regroup import Folds
from mural.shard.folds.reshape import reshaped, settled
from mural.shard.gradient_scale import raw_gradient, true_gradient
from mural.shard.layout import Layout
from mural.shard.ops.pointwise.elementwise import piece_of
from mural.shard.tensor import ShardedTensor, unfolded


@dataclass(frozen=True)
class FunctionPart:
    """The place of a tensor's piece; `sharded` says whether the Function sees a sharded tensor or the plain piece."""

    layout: Layout
    shape: tuple[int, ...]
    sharded: bool
    aliased: str = ""
    folds: Folds = ()
    partial: bool = False

    def seen(self, piece: Tensor) -> Tensor:
        """The tensor that the Function and its caller see."""
        if not self.sharded:
            return piece
        whole = ShardedTensor(piece, self.layout, self.aliased, self.folds)
        whole.partial = self.partial
        return whole

    def gradient_seen(self, raw: Tensor) -> Tensor:
        """The single-device gradient, from that of the piece inside backward; collective."""
        true = true_gradient(raw, self.layout)
        return ShardedTensor(true, self.layout, "", self.folds) if self.sharded else true

    def gradient_of_piece(self, true: Tensor, name: str) -> Tensor:
        """The piece's gradient inside backward, from a single-device gradient in any layout; collective."""
        grad = spread_apart(summed(true, self.shape), self.layout.shape)
        return raw_gradient(piece_of(grad, self.layout, name), self.layout)


def part_of(value: Any, mesh: Mesh) -> FunctionPart | None:
    """The part that a rank's piece of a tensor is; None for a value that is not a tensor."""
    if isinstance(value, ShardedTensor):
        return FunctionPart(value.placement, tuple(value.shape), True, value.aliased, value.folds, value.partial)
    if not isinstance(value, Tensor):
        return None
    shape = tuple(value.shape)
    whole = (None,) * len(shape)
    return FunctionPart(Layout(mesh, shape, whole, whole, ()), shape, False)


def summed(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A gradient summed over the dims along which a tensor of that shape would be broadcast to it, as torch does."""
    lead = grad.ndim - len(shape)
    fits = lead >= 0 and all(n in (1, m) for n, m in zip(shape, grad.shape[lead:], strict=True))
    if not fits:
        raise RuntimeError(f"a gradient of shape {tuple(grad.shape)} was returned for an input of shape {shape}")
    if lead:
        grad = grad.sum(tuple(range(lead)))
    wide = tuple(d for d, n in enumerate(shape) if n == 1 and grad.shape[d] != 1)
    return grad.sum(wide, keepdim=True) if wide else grad


def spread_apart(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A gradient with merged dims separated, in the shape of a placement."""
    if not isinstance(grad, ShardedTensor):
        return grad.reshape(shape)
    if grad.placement.shape == shape:
        return unfolded(grad)
    return reshaped(settled(grad), shape, "reshape", fold=False)
