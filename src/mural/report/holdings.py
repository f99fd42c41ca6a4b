"""Drawings of a collective: its rounds as arrows, and what every rank holds after each round as a table."""

from __future__ import annotations

from html import escape

from mural.collectives.rounds import Collective, Round, Send, by_pair
from mural.errors import PlanError

INK, QUIET, PAPER, ADDED, REPLACED = "#1b1f24", "#59636e", "#fcfcfa", "#14569c", "#a34f00"
COLUMN, ROW, LEFT, TOP, RADIUS = 96, 84, 96, 76, 15

Held = list[list[frozenset[int]]]
"""For each rank and chunk the ranks whose numbers it has."""


def holdings(collective: Collective) -> list[Held]:
    """What every rank holds at the beginning and after each round; of all-reduces without spare places.

    >>> from mural.collectives.algorithms import butterfly
    >>> holdings(butterfly(2))[1]
    [[frozenset({0, 1})], [frozenset({0, 1})]]
    """
    if collective.spares:
        raise PlanError(f"{collective.name} keeps partial sums apart: draw the one that it was made from")
    now: Held = [[frozenset({rank})] * collective.chunks for rank in range(collective.ranks)]
    found = [now]
    for sends in collective.rounds:
        before, now = now, [list(row) for row in now]
        for send in sends:
            brought = before[send.source][send.chunk]
            now[send.destination][send.place] = now[send.destination][send.place] | brought if send.reduce else brought
        found.append(now)
    return found


def text(collective: Collective) -> str:
    """The rounds, and beside each what every rank then holds: the ranks of each chunk's sum.

    >>> from mural.collectives.algorithms import ring
    >>> print(text(ring(2)))
    ring: 2 ranks, 2 chunks
               rank 0    rank 1
    begin      0  0      1  1
    round 1    01 0      1  01
    round 2    01 01     01 01
    """
    every = holdings(collective)
    width = max(len("".join(map(str, s))) for held in every for row in held for s in row)
    cells = [[" ".join("".join(map(str, sorted(s))).ljust(width) for s in row) for row in held] for held in every]
    wide = max(len(cell) for row in cells for cell in row) + 4
    wide = max(wide, len("rank 00") + 3)
    names = ["begin", *(f"round {n}" for n in range(1, len(every)))]
    rows = [("", [f"rank {rank}" for rank in range(collective.ranks)]), *zip(names, cells, strict=True)]
    lines = [name.ljust(11) + "".join(cell.ljust(wide) for cell in row) for name, row in rows]
    return "\n".join([str(collective).split("\n")[0], *(line.rstrip() for line in lines)])


def svg(collective: Collective) -> str:
    """The rounds as an SVG: a column for each rank, a row for each round, blue what is added, brown what replaces."""
    rows = len(collective.rounds)
    width, height = LEFT + COLUMN * collective.ranks, TOP + ROW * rows + 40
    title = str(collective).split("\n")[0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{ADDED}"/></marker><marker id="r" viewBox="0 0 8 8" refX="7" refY="4" '
        f'markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{REPLACED}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        f'<text x="16" y="26" fill="{INK}" font-weight="bold">{escape(title)}</text>',
    ]
    for rank in range(collective.ranks):
        x = column(rank)
        parts.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{TOP + ROW * rows}" stroke="#d5d8dc"/>')
    for number, sends in enumerate(collective.rounds):
        parts.append(f'<text x="16" y="{TOP + ROW * number + ROW / 2 + 4:g}" fill="{QUIET}">round {number + 1}</text>')
        parts += arrows(number, sends)
    for number in range(rows + 1):
        for rank in range(collective.ranks):
            x, y = column(rank), TOP + ROW * number
            parts.append(f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="#ffffff" stroke="{INK}" stroke-width="1.2"/>')
            parts.append(f'<text x="{x}" y="{y + 5}" fill="{INK}" text-anchor="middle">{rank}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def column(rank: int) -> float:
    """Where a rank's column lies."""
    return LEFT + COLUMN * rank + COLUMN / 2


def arrows(number: int, sends: Round) -> list[str]:
    """The messages of a round, with the chunks that each carries."""
    found: list[str] = []
    for (source, destination), between in by_pair(sends).items():
        x, y, x2, y2 = column(source), TOP + ROW * number, column(destination), TOP + ROW * (number + 1)
        length = ((x2 - x) ** 2 + ROW**2) ** 0.5
        dx, dy = (x2 - x) / length * (RADIUS + 1), ROW / length * (RADIUS + 1)
        reduce = between[0].reduce
        colour, head = (ADDED, "a") if reduce else (REPLACED, "r")
        found.append(
            f'<line x1="{x + dx:.1f}" y1="{y + dy:.1f}" x2="{x2 - dx:.1f}" y2="{y2 - dy:.1f}" stroke="{colour}" '
            f'stroke-width="1.8" marker-end="url(#{head})"/>'
        )
        found.append(
            f'<text x="{x + 0.3 * (x2 - x) + 5:.1f}" y="{y + 0.3 * ROW + 4:.1f}" fill="{colour}" font-size="11">'
            f"{'+' if reduce else '='}{chunks_of(between)}</text>"
        )
    return found


def chunks_of(between: list[Send]) -> str:
    """The chunks of some sends, a row of them as first and last.

    >>> chunks_of([Send(0, 1, 2, True), Send(0, 1, 3, True)]), chunks_of([Send(0, 1, 2, True)])
    ('2–3', '2')
    """
    numbers = [send.chunk for send in between]
    row = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"{numbers[0]}–{numbers[-1]}" if row else ",".join(map(str, numbers))
