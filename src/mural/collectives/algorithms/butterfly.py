"""Butterfly, or recursive doubling: in each round every rank exchanges all it has with a partner twice as far.

    4 ranks      0 ⇄ 1   2 ⇄ 3        round 1   0→1 +0   1→0 +0   2→3 +0   3→2 +0
                 0 ⇄ 2   1 ⇄ 3        round 2   0→2 +0   2→0 +0   1→3 +0   3→1 +0

Order of summation: the bracketing of `folds`, (x0 + x1) + (x2 + x3). Both partners add the same two numbers, and a + b
equals b + a bit for bit, so all ranks get the same bits.
"""

from __future__ import annotations

from mural.collectives.algorithms.power_of_two import fold, leaders, unfold
from mural.collectives.rounds import ChunkSend, Collective, joined


def butterfly(ranks: int) -> Collective:
    """All-reduce in log2 P rounds of whole buffers, with a round before and one after if P is not a power of two."""
    led = leaders(ranks)
    rounds = tuple(
        tuple(
            send
            for group in range(len(led))
            if group < group ^ d
            for send in (ChunkSend(led[group], led[group ^ d], 0, True), ChunkSend(led[group ^ d], led[group], 0, True))
        )
        for d in (1 << n for n in range(len(led).bit_length() - 1))
    )
    return joined("butterfly", fold(ranks), Collective("exchange", ranks, 1, rounds), unfold(ranks))
