"""Halving-doubling: partners as in a butterfly, but each gives away half of what it has, and gets it back summed.

    4 ranks, 4 chunks        round 1   0→1 +2 +3   1→0 +0 +1   2→3 +2 +3   3→2 +0 +1     0, 2 keep chunks 0 1
                             round 2   0→2 +1      2→0 +0      1→3 +3      3→1 +2        each keeps one
                             round 3   0→2 =0      2→0 =1      1→3 =2      3→1 =3
                             round 4   0→1 =0 =1   1→0 =2 =3   2→3 =0 =1   3→2 =2 =3

Order of summation: the same as butterfly's, since partners meet in the same order, so the bits are the same.
"""

from __future__ import annotations

from mural.collectives.algorithms.power_of_two import fold, leaders, unfold
from mural.collectives.rounds import ChunkSend, Collective, joined, whole


def kept(group: int, done: int, groups: int) -> range:
    """The chunks that a group still sums after some rounds: half as many after each.

    >>> kept(1, 1, 4), kept(1, 2, 4), kept(2, 2, 4)
    (range(2, 4), range(2, 3), range(1, 2))
    """
    start, length = 0, groups
    for bit in range(done):
        length //= 2
        start += length * (group >> bit & 1)
    return range(start, start + length)


def halving(ranks: int) -> Collective:
    """Each group's leader with the sum of one chunk."""
    led = leaders(ranks)
    groups = len(led)
    rounds = tuple(
        tuple(
            ChunkSend(led[g], led[g ^ 1 << bit], chunk, reduce=True)
            for g in range(groups)
            for chunk in kept(g ^ 1 << bit, bit + 1, groups)
        )
        for bit in range(groups.bit_length() - 1)
    )
    return Collective("halving", ranks, groups, rounds)


def doubling(ranks: int) -> Collective:
    """The sums that `halving` left on single leaders, on all leaders."""
    led = leaders(ranks)
    groups = len(led)
    rounds = tuple(
        tuple(
            ChunkSend(led[g], led[g ^ 1 << bit], chunk, reduce=False)
            for g in range(groups)
            for chunk in kept(g, bit + 1, groups)
        )
        for bit in reversed(range(groups.bit_length() - 1))
    )
    return Collective("doubling", ranks, groups, rounds)


def halving_doubling(ranks: int) -> Collective:
    """All-reduce in 2 log2 P rounds that move no more than a ring does, if P is a power of two."""
    halves, doubles = halving(ranks), doubling(ranks)
    before, after = (whole(part, halves.chunks) for part in (fold(ranks), unfold(ranks)))
    return joined("halving-doubling", before, halves, doubles, after)
