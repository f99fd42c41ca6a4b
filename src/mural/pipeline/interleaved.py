"""Interleaved 1F1B: several stages on each seat, so that the pipeline fills and drains in shorter steps.

With P seats and V chunks there are P × V stages, and stage s sits on seat s % P: a micro-batch passes all seats V
times. Seats take micro-batches in groups: a group goes through the seat's first stage, then through its second, and so
on. While one group drains backward, the next one fills forward:

    seat 0, P = 2, V = 2, groups {0, 1} and {2, 3}, micro-batch@stage
    forwards   0@0 1@0 0@2 1@2   2@0 3@0 2@2 3@2
    backwards  0@2 1@2 0@0 1@0   2@2 3@2 2@0 3@0      the seat's stages in reverse order

Seat r runs 2 (P - 1 - r) + (V - 1) × group forwards ahead, then one forward and one backward in turn. With groups of P
micro-batches this is the order of Megatron-LM, which demands that P divides the number of micro-batches. Ours does
not: a group smaller than P leaves holes, since its first micro-batch is not back yet when the seat is done with its
last, but a larger one leaves none. So M micro-batches become M // P groups of near-equal size, none smaller than P,
and the time is Megatron's for every M >= P: with forward 1 and backward 2, 3 V M + 3 (P - 1) units. (A short last
group costs up to a third more: 8 seats of 4 chunks and 9 micro-batches take 129 units; with groups of 8 and 1, the
best of three greedy orders took 172.)
"""

from __future__ import annotations

from itertools import pairwise

from mural.pipeline.schedule import Action, Schedule, in_line, merged, positive


def interleaved(seats: int, chunks: int, microbatches: int) -> Schedule:
    """A 1F1B order of `seats` × `chunks` stages, stage s on seat s % seats, for any number of micro-batches.

    Two seats and two chunks, for four micro-batches (two groups) and for three (one group):

        01012.aa3bb2aa3bb.cc.ddccdd        012012.aa.bb.ccaabbcc
        .010aa1bb2aa3bb2cc3ddccdd..        .0120aa1bb2ccaabbcc..

    >>> print(interleaved(seats=2, chunks=2, microbatches=3))
    seat 0: F0@0 F1@0 F2@0 F0@2 F1@2 F2@2 B0@2 B1@2 B2@2 B0@0 B1@0 B2@0
    seat 1: F0@1 F1@1 F2@1 F0@3 B0@3 F1@3 B1@3 F2@3 B2@3 B0@1 B1@1 B2@1
    """
    positive(seats=seats, chunks=chunks, microbatches=microbatches)
    groups = grouped(microbatches, seats)
    largest = max(map(len, groups))
    rows: list[list[Action]] = []
    for seat in range(seats):
        stages = range(seat, seats * chunks, seats)
        forwards = [Action("forward", s, m) for group in groups for s in stages for m in group]
        backwards = [Action("backward", s, m) for group in groups for s in reversed(stages) for m in group]
        rows.append(merged(forwards, backwards, ahead=2 * (seats - 1 - seat) + (chunks - 1) * largest))
    return in_line(rows, seats * chunks, microbatches)


def grouped(microbatches: int, size: int) -> list[range]:
    """Consecutive groups of near-equal size, as many as can have at least `size` members; one if there are fewer.

    >>> grouped(11, 4)
    [range(0, 5), range(5, 11)]
    """
    count = max(1, microbatches // size)
    bounds = [microbatches * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]
