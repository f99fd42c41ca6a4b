"""Buffers that a forward binds anew: `self.average = 0.9 * self.average + 0.1 * x.mean((0, 2, 3))`.

What a reduction over a sharded tensor gives is whole on every rank, but still a sharded tensor. As a buffer it becomes
the plain tensor that it is on one device: state dicts hold it, and its owner reads it between steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from mural.shard import ShardedTensor


def make_plain(modules: Iterable[nn.Module]) -> None:
    """Let buffers that no axis cuts be plain tensors."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if isinstance(buffer, ShardedTensor) and not buffer.placement.cut_dims and not buffer.folds:
                module._buffers[name] = buffer.local
