"""The rules of all operations: importing this folder fills the table."""

from mural.shard.ops import (
    attributes,
    conv,
    layernorm,
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
    "attributes",
    "conv",
    "layernorm",
    "loss",
    "norm",
    "pad",
    "pointwise",
    "pool",
    "random",
    "reduce",
    "resample",
    "views",
]
