"""Tree: sums climb a binary tree to one rank, and the result descends the same tree.

    4 ranks      0   1   2   3        round 1   1→0 +0   3→2 +0
                 └───┘   └───┘
                 0 ───── 2            round 2   2→0 +0
                 0 ───── 2            round 3   0→2 =0
                 ┌───┐   ┌───┐
                 0   1   2   3        round 4   0→1 =0   2→3 =0

Order of summation: the bracketing of `folds`, (x0 + x1) + (x2 + x3), the same as butterfly's and halving-doubling's.
"""

from __future__ import annotations

from mural.collectives.algorithms.power_of_two import fold, leaders, unfold
from mural.collectives.rounds import ChunkSend, Collective, joined, pipelined


def climb(ranks: int) -> Collective:
    """The sum on rank 0, in ⌈log2 P⌉ rounds."""
    led = leaders(ranks)
    distances = [1 << n for n in range(len(led).bit_length() - 1)]
    rounds = tuple(
        tuple(ChunkSend(led[g + d], led[g], 0, reduce=True) for g in range(0, len(led), 2 * d)) for d in distances
    )
    return joined("reduce by tree", fold(ranks), Collective("reduce", ranks, 1, rounds))


def descend(ranks: int) -> Collective:
    """Rank 0's values on every rank, in ⌈log2 P⌉ rounds."""
    led = leaders(ranks)
    distances = [1 << n for n in reversed(range(len(led).bit_length() - 1))]
    rounds = tuple(
        tuple(ChunkSend(led[g], led[g + d], 0, reduce=False) for g in range(0, len(led), 2 * d)) for d in distances
    )
    return joined("broadcast by tree", Collective("broadcast", ranks, 1, rounds), unfold(ranks))


def tree(ranks: int, chunks: int = 1) -> Collective:
    """All-reduce by a reduction to rank 0 and a broadcast from it, in chunks that follow each other."""
    return pipelined(joined("tree", climb(ranks), descend(ranks)), chunks)
