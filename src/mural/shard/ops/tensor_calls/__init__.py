"""What can be asked of a sharded tensor: attributes, gradients, and what Python asks of it."""

from mural.shard.ops.tensor_calls import attributes, autograd_calls, python_protocols

__all__ = ["attributes", "autograd_calls", "python_protocols"]
