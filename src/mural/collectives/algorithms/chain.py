"""Chain: values pass from rank to rank along a line; with many chunks every rank is busy.

    3 ranks, 2 chunks, broadcast from rank 0        round 1   0→1 =0
                                                    round 2   1→2 =0   0→1 =1
                                                    round 3   1→2 =1

Order of summation: that of the line from its far end, so rank order backwards: ((x2 + x1) + x0).
"""

from __future__ import annotations

from mural.collectives.rounds import ChunkSend, Collective


def down(ranks: int) -> Collective:
    """Rank 0's values on every rank, in P - 1 rounds."""
    rounds = tuple((ChunkSend(rank, rank + 1, 0, reduce=False),) for rank in range(ranks - 1))
    return Collective("broadcast by chain", ranks, 1, rounds)


def up(ranks: int) -> Collective:
    """The sum on rank 0, in P - 1 rounds."""
    rounds = tuple((ChunkSend(rank, rank - 1, 0, reduce=True),) for rank in range(ranks - 1, 0, -1))
    return Collective("reduce by chain", ranks, 1, rounds)
