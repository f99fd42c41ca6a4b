"""The rounds of a collective as arrows between ranks, as SVG."""

from __future__ import annotations

from math import hypot

from harness.svg import LINES, QUIET, WHITE, Drawing

from mural.collectives.rounds import ChunkSend, Collective, by_pair

COLUMN, ROW, LEFT, TOP, RADIUS = 96, 84, 96, 76, 15


def svg(collective: Collective) -> str:
    """A column for each rank, a row for each round, blue what is added, brown what replaces."""
    title = str(collective).split("\n")[0]
    bottom = TOP + ROW * len(collective.rounds)
    columns = [LEFT + COLUMN * rank + COLUMN // 2 for rank in range(collective.ranks)]
    drawing = Drawing(title, LEFT + COLUMN * collective.ranks, bottom + 40)
    drawing.text(16, 26, title, bold=True, size=13)
    for x in columns:
        drawing.line(x, TOP, x, bottom, "#d5d8dc")
    for number, sends in enumerate(collective.rounds):
        y = TOP + ROW * number
        drawing.text(16, y + ROW // 2 + 4, f"round {number + 1}", QUIET, size=13)
        for (source, destination), between in by_pair(sends).items():
            draw_message(drawing, columns[source], columns[destination], y, between)
    for y in range(TOP, bottom + 1, ROW):
        for rank, x in enumerate(columns):
            drawing.circle(x, y, RADIUS, WHITE)
            drawing.text(x, y + 5, str(rank), anchor="middle", size=13)
    return drawing.svg()


def draw_message(drawing: Drawing, x: int, x2: int, y: int, between: list[ChunkSend]) -> None:
    """Draw the arrow from one circle to another in the next row, with the chunks that the message carries."""
    colour, sign = (LINES[0], "+") if between[0].reduce else (LINES[1], "=")
    part = (RADIUS + 1) / hypot(x2 - x, ROW)
    dx, dy = (x2 - x) * part, ROW * part
    drawing.arrow([(x + dx, y + dy), (x2 - dx, y + ROW - dy)], colour)
    drawing.text(x + 0.3 * (x2 - x) + 5, y + 0.3 * ROW + 4, f"{sign}{chunks_of(between)}", colour, size=11)


def chunks_of(between: list[ChunkSend]) -> str:
    """The chunks of some sends, a row of them as first and last.

    >>> chunks_of([ChunkSend(0, 1, 2, True), Send(0, 1, 3, True)]), chunks_of([Send(0, 1, 2, True)])
    ('2–3', '2')
    """
    numbers = [send.chunk for send in between]
    row = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"{numbers[0]}–{numbers[-1]}" if row else ",".join(map(str, numbers))
