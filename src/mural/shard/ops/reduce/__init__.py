"""Operations on all positions: sums, extremes, softmax, order, scans and losses."""

from mural.shard.ops.reduce import extremes, losses, order, scan, softmax, sums

__all__ = [
    "extremes",
    "losses",
    "order",
    "scan",
    "softmax",
    "sums",
]
