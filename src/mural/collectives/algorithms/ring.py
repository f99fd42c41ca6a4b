"""Ring: every rank sends to the next and receives from the one before, a P-th of the buffer at a time.

    3 ranks, 3 chunks        round 1   0→1 +2   1→2 +0   2→0 +1
                             round 2   0→1 +1   1→2 +2   2→0 +0        rank r has the sum of chunk r
                             round 3   0→1 =0   1→2 =1   2→0 =2
                             round 4   0→1 =2   1→2 =0   2→0 =1

Order of summation: chunk c starts at rank c + 1 and goes round, so chunk 0 is (x1 + x2) + x0: a different bracketing
for each chunk, but the same on all ranks.
"""

from __future__ import annotations

from mural.collectives.rounds import ChunkSend, Collective, Round, joined


def scatter_ring(ranks: int) -> Collective:
    """Reduce-scatter: rank r with the sum of chunk r, in P - 1 rounds."""
    rounds = tuple(
        tuple(ChunkSend(rank, (rank + 1) % ranks, (rank - 1 - n) % ranks, reduce=True) for rank in range(ranks))
        for n in range(ranks - 1)
    )
    return Collective("reduce-scatter by ring", ranks, ranks, rounds)


def gather_ring(ranks: int) -> Collective:
    """All-gather: chunk r of rank r on every rank, in P - 1 rounds."""
    rounds = tuple(
        tuple(ChunkSend(rank, (rank + 1) % ranks, (rank - n) % ranks, reduce=False) for rank in range(ranks))
        for n in range(ranks - 1)
    )
    return Collective("all-gather by ring", ranks, ranks, rounds)


def ring(ranks: int) -> Collective:
    """All-reduce in 2 (P - 1) rounds, in each of which every rank sends and receives at once."""
    return joined("ring", scatter_ring(ranks), gather_ring(ranks))


def ring_blocking(ranks: int) -> Collective:
    """The ring for sends that wait until they are received: in a round, a rank sends or receives.

    If all sent first, all would wait for each other. So even ranks send while odd ones receive, then the other way
    round; in a ring of odd length the last rank sends in a third round.
    """

    def split(sends: Round) -> list[Round]:
        last = ranks - 1 if ranks % 2 else ranks
        even = tuple(s for s in sends if s.source % 2 == 0 and s.source != last)
        odd = tuple(s for s in sends if s.source % 2 == 1)
        alone = tuple(s for s in sends if s.source == last)
        return [part for part in (even, odd, alone) if part]

    rounds = tuple(part for sends in ring(ranks).rounds for part in split(sends))
    return Collective("ring-blocking", ranks, ranks, rounds, blocking=True)
