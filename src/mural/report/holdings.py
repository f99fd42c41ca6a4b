"""What every rank holds after each round of a collective, as a table."""

from __future__ import annotations

from dataclasses import replace

from mural.collectives.rounds import Collective
from mural.collectives.simulate import simulate
from mural.errors import PlanError


def text(collective: Collective) -> str:
    """A line for each round of an all-reduce: the ranks whose numbers are in each chunk that a rank then holds.

    >>> from mural.collectives.algorithms import ring
    >>> print(text(ring(2)))
    ring: 2 ranks, 2 chunks
               rank 0    rank 1
    begin      0  0      1  1
    round 1    01 0      1  01
    round 2    01 01     01 01
    """
    if collective.spares:
        raise PlanError(f"{collective.name} keeps partial sums apart: draw the one that it was made from")
    begin = [[(rank,)] * collective.chunks for rank in range(collective.ranks)]
    lines = {"": [f"rank {rank}" for rank in range(collective.ranks)]}
    for done in range(len(collective.rounds) + 1):
        held = simulate(replace(collective, rounds=collective.rounds[:done]), begin)
        sums = [["".join(map(str, sorted(chunk))) for chunk in mine] for mine in held]
        lines[f"round {done}" if done else "begin"] = [
            " ".join(s.ljust(collective.ranks) for s in mine) for mine in sums
        ]
    wide = max(10, 4 + max(len(cell) for cells in lines.values() for cell in cells))
    table = (name.ljust(11) + "".join(cell.ljust(wide) for cell in cells) for name, cells in lines.items())
    return "\n".join([str(collective).split("\n")[0], *(line.rstrip() for line in table)])
