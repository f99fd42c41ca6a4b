"""Parameter server: all ranks send to rank 0, which sends the sum back: the baseline.

    4 ranks        round 1   1→0 +0   2→0 +0   3→0 +0
                   round 2   0→1 =0   0→2 =0   0→3 =0

Two rounds for any P, but rank 0's link carries P - 1 buffers in each.
Order of summation: rank order, ((x0 + x1) + x2) + x3.
"""

from __future__ import annotations

from mural.collectives.rounds import ChunkSend, Collective


def parameter_server(ranks: int) -> Collective:
    """All-reduce through one rank."""
    up = tuple(ChunkSend(rank, 0, 0, reduce=True) for rank in range(1, ranks))
    down = tuple(ChunkSend(0, rank, 0, reduce=False) for rank in range(1, ranks))
    return Collective("parameter-server", ranks, 1, (up, down) if ranks > 1 else ())
