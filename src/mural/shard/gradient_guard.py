"""Stray gradients: a gradient that reaches a sharded tensor itself is refused.

Gradients belong to the pieces. One that reaches the wrapper around a piece bypassed the rules of sharded tensors, as
with a reentrant checkpoint, and would be lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from mural.errors import UnsupportedOp


def refuse_gradient(grad: Tensor) -> None:
    """Raise for a gradient that reached a wrapper."""
    raise UnsupportedOp(
        "a gradient reached a sharded tensor past its pieces, and would be lost: a reentrant checkpoint or a full "
        "backward hook took the sharded tensor. Use checkpoint(use_reentrant=False), or hooks on tensors"
    )


REFUSING: OrderedDict[int, Callable[[Tensor], Tensor | None]] = OrderedDict({0: refuse_gradient})
"""The hooks of every wrapper that requires a gradient, as torch keeps them; one dict serves all."""


def mirror_gradient(wrapper: Tensor, wanted: bool = True) -> None:
    """Let the wrapper require a gradient if its piece does, and refuse any that reaches the wrapper itself."""
    with torch._C.DisableTorchFunctionSubclass():
        if wanted and not wrapper.requires_grad:
            wrapper.requires_grad_(True)
            wrapper._backward_hooks = REFUSING
        elif not wanted:
            wrapper.requires_grad_(False)
