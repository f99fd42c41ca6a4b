"""Gantt charts of spans as SVG, on one axis of time."""

from __future__ import annotations

from math import floor, log10

from harness.svg import PAPER, QUIET, WHITE, Drawing

from mural.pipeline.timeline import ActionSpan
from mural.report.gantt import COLOURS, Panels, end_of, kind_of, legend, seats, words_of

WIDTH, LEFT, ROW, PITCH = 960, 64, 22, 26


def svg(panels: Panels, title: str, unit: str = "s") -> str:
    """A self-contained SVG; `unit` is that of the times. Each bar says what it is when pointed at."""
    end = end_of([span for spans in panels.values() for span in spans]) or 1.0
    scale, right = (WIDTH - LEFT - 12) / end, WIDTH - 12
    bottom = 40 + sum(30 + PITCH * seats(spans) for spans in panels.values())
    drawing = Drawing(title, WIDTH, bottom + 56)
    drawing.text(LEFT, 24, title, bold=True, size=13)
    y = 40
    for name, spans in panels.items():
        drawing.text(LEFT, y + 12, f"{name}: {end_of(spans):.4g} {unit}", QUIET, bold=True, size=13)
        for seat in range(seats(spans)):
            middle = y + 20 + PITCH * seat + ROW / 2
            drawing.text(LEFT - 8, middle + 4, f"seat {seat}", QUIET, anchor="end", size=11)
            drawing.line(LEFT, middle, right, middle, "#d5d8dc")
        for span in spans:
            draw_bar(drawing, span, y + 20, scale)
        y += 30 + PITCH * seats(spans)
    drawing.line(LEFT, bottom, right, bottom, QUIET)
    drawing.text(LEFT - 8, bottom + 16, unit, QUIET, anchor="end", size=11)
    step = round_step(end / 8)
    for number in range(floor(end / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        drawing.line(x, bottom, x, bottom + 4, QUIET)
        drawing.text(x, bottom + 16, f"{number * step:.6g}", QUIET, anchor="middle", size=11)
    for number, (kind, words) in enumerate(legend(panels).items()):
        x = LEFT + 150 * number
        drawing.rect(x, bottom + 30, 12, 12, COLOURS[kind], PAPER, 0)
        drawing.text(x + 18, bottom + 40, words, QUIET, size=11)
    return drawing.svg()


def draw_bar(drawing: Drawing, span: ActionSpan, y: int, scale: float) -> None:
    """Draw one action, with the number of its micro-batch where there is room."""
    x, width, top = LEFT + span.start * scale, (span.end - span.start) * scale, y + PITCH * span.seat
    number = str(span.action.microbatch)
    with drawing.saying(words_of(span)):
        drawing.rect(x, top, max(width, 0.4), ROW, COLOURS[kind_of(span)], PAPER, 0.6)
        if width > 8 * len(number):
            drawing.text(x + width / 2, top + 15, number, WHITE, anchor="middle", size=11)


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, … that is not smaller.

    >>> round_step(0.3), round_step(7)
    (0.5, 10.0)
    """
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
