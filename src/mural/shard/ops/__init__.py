"""The rules of all operations: importing this package fills the table."""

from mural.shard.folds import dims_underneath, losses_underneath, underneath
from mural.shard.ops import norm, pointwise, product, random, reduce, refused, tensor_calls, view, windowed

__all__ = [
    "dims_underneath",
    "losses_underneath",
    "norm",
    "pointwise",
    "product",
    "random",
    "reduce",
    "refused",
    "tensor_calls",
    "underneath",
    "view",
    "windowed",
]
