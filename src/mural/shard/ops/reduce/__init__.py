"""Operations on all positions: sums, extremes, softmax, order, scans and losses."""

from mural.shard.ops.reduce import extremes, losses, norms, order, scan, softmax, sums, weighted_l1

__all__ = [
    "extremes",
    "losses",
    "norms",
    "order",
    "scan",
    "softmax",
    "sums",
    "weighted_l1",
]
