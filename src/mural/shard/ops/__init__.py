"""The rules of all operations: importing this folder fills the table."""

from mural.shard.ops import (
    attributes,
    conv,
    loss,
    norm,
    pad,
    pointwise,
    pool,
    random,
    reduce,
    resample,
    views,
)

__all__ = [
    "attributes", "conv", "loss", "norm", "pad", "pointwise", "pool", "random", "reduce", "resample", "views",
]  # fmt: skip
