"""Operations that read a window of the image for each output."""

from mural.shard.ops.windowed import (
    adaptive,
    affine_grid,
    conv,
    deform,
    diff,
    grid_sample,
    pad,
    pool,
    pool_indices,
    resample,
    unfold,
    unpool,
)

__all__ = [
    "adaptive",
    "affine_grid",
    "conv",
    "deform",
    "diff",
    "grid_sample",
    "pad",
    "pool",
    "pool_indices",
    "resample",
    "unfold",
    "unpool",
]
