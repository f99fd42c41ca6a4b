"""Ordered sums: any all-reduce, changed to add in one fixed bracketing, so that all give the same bits.

The bracketing is that of `algorithms.folds`, a binary tree over the ranks: ((x0 + x1) + (x2 + x3)) for four. Tree,
butterfly and halving-doubling have it already. Another algorithm meets numbers that are not neighbours in the tree;
these travel on separately, in spare places, until their neighbours arrive:

    ring, chunk 0 of 4 ranks        x1 ──→ x1, x2 ──→ x1, x2+x3 ──→ (x0+x1) + (x2+x3)
                                   rank 1   rank 2     rank 3        rank 0

At most 2 log2 P numbers travel instead of one: the price of the order, for which `cost` has the exact figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise

from mural.collectives.algorithms.power_of_two import leaders
from mural.collectives.rounds import ChunkSend, Collective, Round
from mural.errors import PlanError

Sum = frozenset[int]
"""The ranks whose numbers a partial sum holds."""
Held = dict[Sum, int]
"""The place of each partial sum that a rank keeps of one chunk."""
Memory = dict[tuple[int, int], Held]
"""The partial sums that each rank keeps of each chunk."""


def siblings(ranks: int) -> dict[Sum, Sum]:
    """For every node of the bracketing but the last, the node that it is added to.

    >>> sorted(map(sorted, siblings(3)))
    [[0], [0, 1], [1], [2]]
    """
    bounds = (*leaders(ranks), ranks)
    found: dict[Sum, Sum] = {}
    level = [frozenset(range(a, b)) for a, b in pairwise(bounds)]
    for group in level:
        if len(group) == 2:
            first, second = (frozenset({rank}) for rank in sorted(group))
            found |= {first: second, second: first}
    while len(level) > 1:
        for first, second in zip(level[::2], level[1::2], strict=True):
            found |= {first: second, second: first}
        level = [a | b for a, b in zip(level[::2], level[1::2], strict=True)]
    return found


def ordered(collective: Collective) -> Collective:
    """The same all-reduce with sums in the fixed bracketing.

    >>> from mural.collectives.algorithms import butterfly, ring
    >>> ordered(butterfly(6)) == butterfly(6), ordered(ring(3)).spares
    (True, 2)
    """
    sibling = siblings(collective.ranks)
    memory: Memory = {
        (rank, chunk): {frozenset({rank}): chunk}
        for rank in range(collective.ranks)
        for chunk in range(collective.chunks)
    }
    rounds: list[Round] = []
    for sends in collective.rounds:
        before = {key: dict(held) for key, held in memory.items()}
        messages = [m for s in sends for m in carried(s, collective.chunks, before, memory, sibling)]
        reached = dict.fromkeys((s.destination, s.chunk) for s in sends)
        rounds.append((*messages, *(m for at in reached for m in merged(*at, memory[at], sibling))))
    return replace(collective, rounds=tuple(rounds))


def carried(
    send: ChunkSend, chunks: int, before: Memory, memory: Memory, sibling: dict[Sum, Sum]
) -> Iterator[ChunkSend]:
    """One send as several, one for each partial sum that its source held."""
    chunk, source, target = send.chunk, before[send.source, send.chunk], memory[send.destination, send.chunk]
    if send.local or send.into >= 0:
        raise PlanError(f"{send} keeps numbers apart already: order a collective once")
    if not send.reduce:
        target.clear()
        for into, (numbers, place) in enumerate(source.items()):
            target[numbers] = chunk + into * chunks
            yield ChunkSend(
                send.source, send.destination, place, False, -1 if target[numbers] == place else target[numbers]
            )
        return
    if met := frozenset(chain.from_iterable(source)) & frozenset(chain.from_iterable(target)):
        raise PlanError(f"{send} would add the numbers of rank {min(met)} twice")
    if len(source) == len(target) == 1:
        ((mine, place),), ((theirs, at),) = source.items(), target.items()
        if place == at == chunk and sibling.get(mine) == theirs:  # nothing to keep apart
            target.clear()
            target[mine | theirs] = chunk
            yield ChunkSend(send.source, send.destination, chunk, True)
            return
    for numbers, place in source.items():
        free = next(p for p in range(chunk + chunks, 2**31, chunks) if p not in target.values())
        target[numbers] = free
        yield ChunkSend(send.source, send.destination, place, False, free)


def merged(rank: int, chunk: int, held: Held, sibling: dict[Sum, Sum]) -> Iterator[ChunkSend]:
    """The additions on one rank that the bracketing allows now; a complete sum ends in its chunk's own place."""
    while pair := next(((a, sibling[a]) for a in held if sibling.get(a) in held), None):
        first, second = sorted((held.pop(numbers), numbers) for numbers in pair)
        held[first[1] | second[1]] = first[0]
        yield ChunkSend(rank, rank, second[0], True, first[0])
    if len(held) == 1:
        ((numbers, place),) = held.items()
        if place != chunk:
            held[numbers] = chunk
            yield ChunkSend(rank, rank, place, False, chunk)
