"""Products of tensors, attention and recurrent layers."""

from mural.shard.ops.product import attention, products, recurrent

__all__ = ["attention", "products", "recurrent"]
