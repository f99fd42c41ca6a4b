"""Draws docs/concepts/drawings from mural's own windows, cuts and moves: python docs/draw_concepts.py"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mural.comm.messages import Transport
from mural.geometry import Box, Cuts, Interval, Move, Needs, Remap, Window, moves, overlap, subtract, volume
from mural.ranks import Mesh
from mural.shard.layout import MIN_EXTENT, Layout

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from harness.svg import FILLS, INK, LINES, QUIET, RED, SHARED, WHITE, Drawing

FOLDER = Path(__file__).parent / "concepts" / "drawings"
CHOSEN, CHOSEN_LINE, FAINT = "#ffeb99", "#7a5c00", "#a0a8b1"


def span(interval: Interval) -> str:
    """An interval as mathematics writes it."""
    return f"[{interval.start}, {interval.stop})".replace("-", "−")


def one(o: int) -> Interval:
    """The interval of one position."""
    return Interval(o, o + 1)


def owner(cuts: Cuts, position: int) -> int:
    """The coordinate that holds a position."""
    return next(c for c, i in enumerate(cuts.intervals()) if i.contains(one(position)))


def received(have: Mapping[int, Box], need: Mapping[int, Needs], rank: int) -> list[Move]:
    """The messages that reach a rank."""
    return [m for m in moves(have, need) if m.destination == rank != m.source]


# What an output reads -------------------------------------------------------------------------------------------------


def formula(window: Window) -> str:
    """What output o reads, in the numbers of a window."""

    def bound(offset: int) -> str:
        times = "o" if window.num == 1 else f"{window.num}·o"
        inner = times if offset == 0 else f"{times} {'+' if offset > 0 else '−'} {abs(offset)}"
        return inner if window.den == 1 else f"({inner}) // {window.den}" if offset else f"{inner} // {window.den}"

    return f"[{bound(window.lo)}, {bound(window.hi)})"


def ladder(drawing: Drawing, top: int, name: str, window: Window, out: Interval) -> None:
    """Inputs above, outputs below, and a line for each read."""
    left, pitch = 170, 54
    step, out_step = pitch * window.den, pitch * window.num
    reads = {o: range(*window.span(one(o))) for o in range(window.out_extent)}
    reached = range(*window.span(out))
    drawing.text(20, top + 16, name, bold=True)
    drawing.text(20, top + 40, f"output o reads {formula(window)}")
    for o, inputs in reads.items():
        style = (CHOSEN_LINE, 2.4) if o in range(*out) else (FAINT, 1.3)
        for i in inputs:
            drawing.line(left + i * step, top + 94, left + o * out_step, top + 140, *style)
    drawing.text(20, top + 83, "input", QUIET)
    for i in range(*window.span(Interval(0, window.out_extent))):
        border = not 0 <= i < window.extent
        fill = CHOSEN if i in reached else WHITE
        drawing.cell(left + i * step - 20, top + 62, 40, 32, i, fill, QUIET if border else INK, border)
    drawing.text(20, top + 161, "output", QUIET)
    for o in reads:
        drawing.cell(left + o * out_step - 20, top + 140, 40, 32, o, CHOSEN if o in range(*out) else WHITE)
    drawing.text(left - 20, top + 194, f"outputs {span(out)} read inputs {span(window.span(out))}", CHOSEN_LINE)


def windows() -> str:
    """Convolutions of stride 1 and 2, and a transposed convolution."""
    drawing, out = Drawing("What an output reads", 800, 718), Interval(2, 4)
    ladder(drawing, 15, "Convolution, kernel 3, stride 1, padding 1", Window.conv(10, 3, 1, 1), out)
    ladder(drawing, 240, "Convolution, kernel 3, stride 2, padding 1", Window.conv(10, 3, 2, 1), out)
    name = "Transposed convolution, kernel 3, stride 2, padding 1, output padding 1"
    ladder(drawing, 465, name, Window.transposed(5, 3, 2, 1, 1), out)
    drawing.text(20, 700, "Dashed: beyond the image. The operation's border rule says what stands there.", QUIET)
    return drawing.svg()


def borders() -> str:
    """What padding reads: a constant, or a row of the image that may lie on another rank."""
    drawing = Drawing("The true border of the image", 800, 316)
    image, pad, pitch, left = Cuts.even(10, 2), 2, 38, 110
    outs = image.scaled(image.extent + 2 * pad)
    right = left + pitch * outs.extent + 15
    modes = {
        "zeros": Window.shifted(image.extent, outs.extent, -pad),
        "reflect": Remap.reflect(image.extent, pad, pad),
        "replicate": Remap.replicate(image.extent, pad, pad),
        "circular": Remap.circular(image.extent, pad, pad),
    }
    drawing.text(20, 30, f"{image.extent} rows padded by {pad} on both sides: which row each output reads", bold=True)
    drawing.text(right, 62, "rank 0 reads", bold=True)
    drawing.text(20, 62, "output", QUIET)
    for o in range(outs.extent):
        drawing.text(left + (o + 0.5) * pitch, 62, str(o), QUIET, anchor="middle")
    for row, (name, reads) in enumerate(modes.items()):
        y = 72 + 46 * row
        drawing.text(20, y + 22, name)
        for o in range(outs.extent):
            ((row_read, end),) = reads.reads(one(o))
            inside = row_read < end
            fill = FILLS[owner(image, row_read)] if inside else WHITE
            drawing.cell(left + o * pitch, y, pitch, 34, row_read if inside else "zero", fill, dash=not inside)
        drawing.text(right, y + 22, " and ".join(span(i) for i in reads.reads(outs.interval(0))))
    drawing.line(left + outs.bounds[1] * pitch, 46, left + outs.bounds[1] * pitch, 252, RED, 3, True)
    for rank in range(2):
        drawing.rect(left + 210 * rank, 280, 18, 18, FILLS[rank])
        drawing.text(left + 26 + 210 * rank, 294, f"row held by rank {rank}")
    drawing.text(540, 294, "Red: the cut of the output", RED)
    return drawing.svg()


# Who owns what --------------------------------------------------------------------------------------------------------


def level(image: Cuts, extent: int) -> Cuts | None:
    """How mural cuts a level of that extent; None where it is replicated."""
    mesh, axis = Mesh((1, 1, 1, 1, image.parts, 1, 1), 0, 1, Transport(None, 0.0)), "spatial0"
    return Layout(mesh, (image.extent,), (axis,), (image,), ((axis, image),)).cut_for(0, extent)


def unet(drawing: Drawing, top: int, image: Cuts) -> None:
    """The levels of a small U-Net as columns of equal height, each with its cuts."""
    half = Window.conv(image.extent, 3, 2, 1).out_extent
    extents = [image.extent, half, Window.conv(half, 3, 2, 1).out_extent, half, image.extent]
    height, width, step, left, y = 170, 96, 146, 62, top + 86
    drawing.text(20, top + 16, f"{image.extent} rows, {image.parts} ranks", bold=True)
    for column, extent in enumerate(extents):
        x, cuts, row = left + column * step, level(image, extent), height / extent
        for coordinate, part in enumerate(cuts.intervals() if cuts else [Interval(0, extent)]):
            fill = FILLS[coordinate] if cuts else SHARED
            drawing.rect(x, y + part.start * row, width, part.size * row, fill, width=1.8)
            drawing.text(x + width / 2, y + (part.start + part.stop) / 2 * row + 5, span(part), anchor="middle")
        for i in range(1, extent):
            drawing.line(x, y + i * row, x + 9, y + i * row, width=1)
        bounds = ", ".join(map(str, cuts.bounds)) if cuts else "on every rank"
        drawing.text(x + width / 2, y + height + 20, bounds, INK if cuts else QUIET, anchor="middle")
    for column, up in ((0, 50), (1, 28)):
        a, b = (left + c * step + width / 2 for c in (column, 4 - column))
        drawing.arrow([(a, y), (a, y - up), (b, y - up), (b, y - 1)])
    drawing.text(left + 2 * step + width / 2, y - 10, "skips", QUIET, anchor="middle")


def cuts() -> str:
    """Who owns what at each level of a U-Net."""
    drawing = Drawing("Cuts in the image's proportions", 800, 938)
    for row, image in enumerate((Cuts.even(10, 2), Cuts.even(10, 3), Cuts.even(20, 3))):
        unet(drawing, 15 + 298 * row, image)
    for rank in range(3):
        drawing.rect(62 + 110 * rank, 906, 18, 18, FILLS[rank])
        drawing.text(88 + 110 * rank, 920, f"rank {rank}")
    drawing.rect(400, 906, 18, 18, SHARED)
    drawing.text(426, 920, f"replicated: fewer than {MIN_EXTENT} rows for each rank")
    return drawing.svg()


# Messages -------------------------------------------------------------------------------------------------------------


def exchange(drawing: Drawing, top: int, name: str, cuts: Cuts, window: Window) -> None:
    """Have, need, and the messages between them, along one dim."""
    pitch, left = 42, 135
    right = left + pitch * cuts.extent + 22
    have = {c: (i,) for c, i in enumerate(cuts.intervals())}
    need = {c: (window.reads(i),) for c, (i,) in have.items()}
    drawing.text(20, top + 16, name, bold=True)
    drawing.text(20, top + 53, "have")
    drawing.text(right, top + 53, "messages", bold=True)
    for i in range(cuts.extent):
        drawing.cell(left + i * pitch, top + 32, pitch, 32, i, FILLS[owner(cuts, i)])
    for rank, ((wanted,),) in need.items():
        y, (own,) = top + 80 + 42 * rank, have[rank]
        drawing.text(20, y + 21, f"rank {rank} needs", LINES[rank])
        for i in range(*wanted):
            holder = owner(cuts, i)
            drawing.cell(left + i * pitch, y, pitch, 32, i, WHITE if holder == rank else FILLS[holder], LINES[holder])
        drawing.rect(left + own.start * pitch, y, own.size * pitch, 32, "none", LINES[rank], 2.5)
        found = received(have, need, rank)
        drawing.text(right, y + 21, ", ".join(f"{span(m.box[0])} from {m.source}" for m in found))


def messages() -> str:
    """How have and need become messages, also where a shard is thinner than the halo."""
    drawing, window = Drawing("Have and need become messages", 800, 490), Window.conv(10, 5, 1, 2)
    exchange(drawing, 15, "Kernel 5, padding 2: a halo of 2 rows", Cuts.even(10, 3), window)
    name = "The same, with a shard of one row: the halo reaches past it"
    exchange(drawing, 242, name, Cuts.of((0, 5, 6, 10)), window)
    drawing.text(20, 472, "Framed: its own rows. Coloured: what it receives, in the owner's colour.", QUIET)
    return drawing.svg()


def halo(extent: int) -> tuple[dict[int, Box], dict[int, Needs]]:
    """What four ranks in a square have and need of a square image for a 3 × 3 convolution."""
    window, parts = Window.conv(extent, 3, 1, 1), Cuts.even(extent, 2).intervals()
    have: dict[int, Box] = dict(enumerate((r, c) for r in parts for c in parts))
    return have, {rank: tuple(window.reads(i) for i in box) for rank, box in have.items()}


def grid() -> str:
    """Strips and a corner in a 2 × 2 grid."""
    drawing = Drawing("A 2 × 2 grid: strips and a corner", 800, 432)
    extent, pitch, left, top, right = 10, 34, 30, 68, 400
    have, need = halo(extent)
    wanted: Box = tuple(i for (i,) in need[0])
    drawing.text(left, 30, f"{extent} × {extent} pixels, 4 ranks, kernel 3 × 3, padding 1", bold=True)
    drawing.text(left, 54, f"Rank 0 needs rows {span(wanted[0])} and columns {span(wanted[1])}.")

    def place(box: Box) -> tuple[float, float, float, float]:
        return left + box[1].start * pitch, top + box[0].start * pitch, box[1].size * pitch, box[0].size * pitch

    for rank, box in have.items():
        drawing.rect(*place(box), FILLS[rank])
    for i in range(1, extent):
        drawing.line(left + i * pitch, top, left + i * pitch, top + extent * pitch, "#b9c0c7", 0.7)
        drawing.line(left, top + i * pitch, left + extent * pitch, top + i * pitch, "#b9c0c7", 0.7)
    for rank, box in have.items():
        x, y, w, h = place(box)
        drawing.text(x + w / 2, y + h * 0.7 + 5, f"rank {rank}", LINES[rank], bold=True, anchor="middle")
    drawing.text(right, top + 18, "Rank 0 receives", bold=True)
    for row, m in enumerate(received(have, need, 0)):
        y, count = top + 30 + 52 * row, volume(m.box)
        drawing.rect(*place(m.box), LINES[m.source])
        drawing.rect(right, y + 3, 20, 20, LINES[m.source])
        words = f"a strip of {count} pixels" if count > 1 else "the corner, one pixel,"
        drawing.text(right + 32, y + 18, f"{words} from rank {m.source}:")
        drawing.text(right + 32, y + 40, f"rows {span(m.box[0])}, columns {span(m.box[1])}")
    drawing.rect(*place(wanted), "none", INK, 3.5)
    drawing.text(right, top + 218, "It keeps them in two slabs", bold=True)
    for row, slab in enumerate(subtract(wanted, overlap(wanted, have[0]))):
        ranks = " and ".join(str(m.source) for m in received(have, need, 0) if volume(overlap(slab, m.box)))
        words = f"slab {row}: rows {span(slab[0])}, columns {span(slab[1])}, from {ranks}"
        drawing.text(right, top + 242 + 24 * row, words)
    large = 8192
    total = sum(volume(m.box) for m in moves(*halo(large)) if m.source != m.destination)
    drawing.text(right, top + 312, f"Of {large} × {large} pixels, the four ranks together", QUIET)
    drawing.text(right, top + 334, f"receive {total}: {100 * total / large**2:.2f} %.", QUIET)
    return drawing.svg()


# The worked example: one column of ten pixels, and the middle column of the kernel ------------------------------------

IMAGE, KERNEL, GRADIENT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (1, 2, 3), (1, 2, 3, 4, 5)
WINDOW, ROWS = Window.conv(len(IMAGE), len(KERNEL), 2, 1), Cuts.even(len(IMAGE), 2)
OUTS = ROWS.scaled(WINDOW.out_extent)
TAPS = {
    (o, i): KERNEL[i - WINDOW.span(one(o)).start]
    for o in range(WINDOW.out_extent)
    for i in range(*WINDOW.reads(one(o))[0])
}
"""The weight with which an output reads a row."""
INSIDE = [(o, i) for o, i in TAPS if owner(OUTS, o) == owner(ROWS, i)]
ACROSS = next(pair for pair in TAPS if pair not in INSIDE)
"""The one read across the cut."""


def numbers(drawing: Drawing, y: int, name: str, values: Mapping[int, object], cuts: Cuts) -> None:
    """A row of numbers, in the colours of the ranks that hold them; outputs stand below the rows they read."""
    step = 58 * WINDOW.num if cuts is OUTS else 58
    drawing.text(20, y + 21, name, QUIET)
    for i, value in values.items():
        drawing.cell(205 + step * i - 22, y, 44, 32, value, FILLS[owner(cuts, i)])


def connect(drawing: Drawing, y: int, y2: int, pairs: Sequence[tuple[int, int]], color: str, width: float) -> None:
    """Lines between image rows at y and the outputs at y2 that read them."""
    for o, i in pairs:
        drawing.line(205 + 58 * i, y, 205 + 58 * WINDOW.num * o, y2, color, width)


def forward() -> str:
    """The interior with zeros beyond the cut, and what the strip adds."""
    drawing, (late, row) = Drawing("A convolution by interior and strip", 800, 470), ACROSS
    interior = {o: sum(TAPS[p] * IMAGE[p[1]] for p in INSIDE if p[0] == o) for o in range(OUTS.extent)}
    strip = TAPS[ACROSS] * IMAGE[row]
    source, target = owner(ROWS, row), owner(OUTS, late)
    x, out_x = 205 + 58 * row, 205 + 58 * WINDOW.num * late
    drawing.text(20, 30, f"Kernel column {KERNEL}, stride {WINDOW.num}, padding {-WINDOW.lo}, two ranks", bold=True)
    drawing.text(20, 72, "row", QUIET)
    for i in range(len(IMAGE)):
        drawing.text(205 + 58 * i, 72, str(i), QUIET, anchor="middle")
    numbers(drawing, 82, "image", dict(enumerate(IMAGE)), ROWS)
    connect(drawing, 114, 186, INSIDE, FAINT, 1.5)
    numbers(drawing, 186, "interior: zeros", interior, OUTS)
    drawing.text(20, 227, "beyond the cut", QUIET)
    drawing.arrow([(x, 114), (x, 286), (out_x + 24, 286)], LINES[source])
    numbers(drawing, 270, "strip", {late: f"+ {strip}"}, OUTS)
    drawing.text(x + 12, 274, f"row {row} travels from rank {source} to rank {target},", LINES[source])
    drawing.text(x + 12, 296, f"and adds {TAPS[ACROSS]} · {IMAGE[row]} = {strip} to output {late}", LINES[source])
    drawing.arrow([(out_x, 302), (out_x, 348)], LINES[target])
    numbers(drawing, 350, "output", {o: n + strip * (o == late) for o, n in interior.items()}, OUTS)
    drawing.text(20, 405, "output row", QUIET)
    for o in range(OUTS.extent):
        drawing.text(205 + 58 * WINDOW.num * o, 405, str(o), QUIET, anchor="middle")
    for y, cut in ((54, 205 + 58 * (ROWS.bounds[1] - 0.5)), (340, 205 + 58 * WINDOW.num * (OUTS.bounds[1] - 0.5))):
        drawing.line(cut, y, cut, y + 70, RED, 2.5, True)
    own = ROWS.interval(target)
    words = f"Blue: on rank 0. Orange: on rank 1. Rows {span(own)} are not copied in order to attach row {row}."
    drawing.text(20, 448, words, QUIET)
    return drawing.svg()


def backward() -> str:
    """The strip's gradient goes home while the interior computes."""
    drawing, (late, row) = Drawing("Backward: strips of gradient are sent home", 800, 466), ACROSS
    interior = {i: sum(TAPS[p] * GRADIENT[p[0]] for p in INSIDE if p[1] == i) for i in range(ROWS.extent)}
    strip = TAPS[ACROSS] * GRADIENT[late]
    total = {i: n + strip * (i == row) for i, n in interior.items()}
    source, target = owner(OUTS, late), owner(ROWS, row)
    drawing.text(20, 30, "Time goes from left to right", bold=True)
    left, tops, height = 85, (48, 178), 84
    given = f"{TAPS[ACROSS]} · {GRADIENT[late]} = {strip}"
    first = (0, 218, "1. Strip first", f"row {row} gets from output {late}", given)
    for rank, y in enumerate(tops):
        rows = range(*ROWS.interval(rank))
        drawing.text(20, y + 48, f"rank {rank}", LINES[rank], bold=True)
        mine = ", ".join(str(interior[i]) for i in rows)
        steps = [(235, 220, "2. Interior", f"rows {span(ROWS.interval(rank))} get", mine)]
        done = ", ".join(str(total[i]) for i in rows)
        last = (475, 220, "3. Add what came", f"row {row}: {interior[row]} + {strip} = {total[row]}", done)
        for x, width, *words in [first] * (rank == source) + steps + [last] * (rank == target):
            drawing.rect(left + x, y, width, height, FILLS[rank], LINES[rank])
            for line, word in enumerate(words):
                drawing.text(left + x + 10, y + 24 + 24 * line, word, bold=line == 0)
    down = [(107, tops[source] + height), (107, 155), (585, 155), (585, tops[target] - 2)]
    drawing.arrow([(left + x, y) for x, y in down], LINES[source])
    drawing.text(left + 120, 149, f"{strip} travels to rank {target}, the owner of row {row}", LINES[source])
    numbers(drawing, 308, "gradient of output", dict(enumerate(GRADIENT)), OUTS)
    connect(drawing, 404, 340, INSIDE, FAINT, 1.5)
    connect(drawing, 404, 340, [ACROSS], LINES[source], 3)
    numbers(drawing, 404, "gradient of image", total, ROWS)
    return drawing.svg()


DRAWINGS = {f"{draw.__name__}.svg": draw for draw in (windows, borders, cuts, messages, grid, forward, backward)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, draw in DRAWINGS.items():
        (FOLDER / file).write_text(draw(), encoding="utf-8")
        print(f"wrote {FOLDER / file}")
