"""Folds: how a number of ranks that is not a power of two becomes one, and the resulting bracketing of sums.

The first 2 r of P = 2^q + r ranks form pairs, so that 2^q groups remain, each led by its first rank. The groups then
pair up at distance 1, 2, 4, …; sums nest accordingly:

    P = 6, q = 2, r = 2        groups {0, 1} {2, 3} {4} {5}        ((x0 + x1) + (x2 + x3)) + (x4 + x5)
    P = 5, q = 2, r = 1        groups {0, 1} {2} {3} {4}           ((x0 + x1) + x2) + (x3 + x4)
"""

from __future__ import annotations

from mural.collectives.rounds import ChunkSend, Collective


def leaders(ranks: int) -> tuple[int, ...]:
    """The rank that leads each group; their number is the largest power of two within `ranks`.

    >>> leaders(6), leaders(8)
    ((0, 2, 4, 5), (0, 1, 2, 3, 4, 5, 6, 7))
    """
    groups = 1 << (ranks.bit_length() - 1)
    extra = ranks - groups
    return tuple(2 * group if group < extra else group + extra for group in range(groups))


def fold(ranks: int) -> Collective:
    """The second rank of each pair gives its sum to the first: one round, or none for a power of two.

    >>> print(fold(6))
    fold: 6 ranks, 1 chunk
    round 1   1→0 +0   3→2 +0
    """
    sends = tuple(ChunkSend(2 * n + 1, 2 * n, 0, reduce=True) for n in range(ranks - len(leaders(ranks))))
    return Collective("fold", ranks, 1, (sends,) if sends else ())


def unfold(ranks: int) -> Collective:
    """The first rank of each pair gives the result to the second.

    >>> print(unfold(5))
    unfold: 5 ranks, 1 chunk
    round 1   0→1 =0
    """
    sends = tuple(ChunkSend(2 * n, 2 * n + 1, 0, reduce=False) for n in range(ranks - len(leaders(ranks))))
    return Collective("unfold", ranks, 1, (sends,) if sends else ())
