"""Attributes and gradients of a sharded tensor, and Python's protocols."""

from mural.shard.ops.tensor_calls import attributes, autograd_calls, python_protocols

__all__ = ["attributes", "autograd_calls", "python_protocols"]
