"""Gantt charts of spans, predicted and measured: as plain text, as SVG for documents, and as a page to zoom into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path

from mural.errors import ConfigError
from mural.pipeline.schedule import Action
from mural.pipeline.timeline import Span
from mural.report import plots
from mural.report.shell import document
from mural.report.svg import PAPER, QUIET, WHITE, Drawing

Panels = Mapping[str, Sequence[Span]]
"""Lists of spans by their names, all drawn on one axis of time."""

# Dark enough for white letters, and apart from white and from black alike; by replica and kind.
COLOURS = {
    (0, "forward"): "#2f6db5",
    (0, "backward"): "#b4610d",
    (1, "forward"): "#1f7f6f",
    (1, "backward"): "#a13d78",
}
TITLE = "Gantt chart of a pipeline"
WIDTH, LEFT, ROW, PITCH = 960, 64, 22, 26


def letter(action: Action) -> str:
    """An action as one character: a digit for a forward, a letter for a backward, of the micro-batch's number.

    >>> letter(Action("forward", 0, 12)), letter(Action("backward", 0, 2))
    ('2', 'c')
    """
    if action.kind == "forward":
        return str(action.microbatch % 10)
    return chr(ord("a") + action.microbatch % 26)


def text(spans: Iterable[Span], unit: float | None = None) -> str:
    """A row for each seat, a character for each unit of time: what the seat did in the middle of it, a dot if nothing.

    Without `unit`, a hundredth of the whole time. Digits are forwards and letters backwards, by micro-batch.

    >>> print(text([Span(0, Action("forward", 0, 0), 0, 1), Span(1, Action("backward", 1, 0), 1, 3)], unit=1))
    0..
    .aa
    """
    spans = list(spans)
    unit = unit or end_of(spans) / 100 or 1.0
    columns = ceil(end_of(spans) / unit - 1e-9)
    rows = [["."] * columns for _ in range(seats(spans))]
    for span in spans:
        # The columns whose middle lies in [start, end).
        first, last = ceil(span.start / unit - 0.5), ceil(span.end / unit - 0.5)
        for column in range(max(0, first), min(columns, last)):
            rows[span.seat][column] = letter(span.action)
    return "\n".join(map("".join, rows))


def svg(panels: Panels, title: str = TITLE, unit: str = "s") -> str:
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


def draw_bar(drawing: Drawing, span: Span, y: int, scale: float) -> None:
    """Draw one action, with the number of its micro-batch where there is room."""
    x, width, top = LEFT + span.start * scale, (span.end - span.start) * scale, y + PITCH * span.seat
    number = str(span.action.microbatch)
    with drawing.saying(words_of(span)):
        drawing.rect(x, top, max(width, 0.4), ROW, COLOURS[kind_of(span)], PAPER, 0.6)
        if width > 8 * len(number):
            drawing.text(x + width / 2, top + 15, number, WHITE, anchor="middle", size=11)


def html(panels: Panels, title: str = TITLE, unit: str = "s") -> str:
    """A self-contained page with the chart: parts of it can be enlarged, and each bar says what it is."""
    heads = [f"{name}: {end_of(spans):.4g} {unit}" for name, spans in panels.items()]
    figure = plots.figure(heads, [seats(spans) for spans in panels.values()], unit, barmode="overlay")
    for row, spans in enumerate(panels.values(), start=1):
        for kind, name in legend(panels).items():
            mine = [span for span in spans if kind_of(span) == kind]
            figure.add_bar(
                base=[span.start for span in mine],
                x=[span.end - span.start for span in mine],
                y=[f"seat {span.seat}" for span in mine],
                text=[str(span.action.microbatch) for span in mine],
                hovertext=[words_of(span) for span in mine],
                marker_color=COLOURS[kind],
                **plots.named(name, row),
            )
    return document(title, plots.html(figure), script=plots.script())


FORMATS: Mapping[str, Callable[[Panels, str], str]] = {".svg": svg, ".html": html}


def write(path: Path, panels: Panels, title: str) -> None:
    """Write the chart to a file, as its suffix says."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} would be a chart of an unknown kind: let its name end in {' or '.join(FORMATS)}")
    path.write_text(FORMATS[path.suffix](panels, title), encoding="utf-8")


def end_of(spans: Sequence[Span]) -> float:
    """When the last span ends."""
    return max((span.end for span in spans), default=0.0)


def seats(spans: Sequence[Span]) -> int:
    """How many rows a panel has."""
    return 1 + max((span.seat for span in spans), default=-1)


def kind_of(span: Span) -> tuple[int, str]:
    """What a span's colour depends on."""
    return span.action.replica % 2, span.action.kind


def words_of(span: Span) -> str:
    """What a bar says."""
    return f"{span.action}: {span.start:.4g} to {span.end:.4g}"


def legend(panels: Panels) -> dict[tuple[int, str], str]:
    """What the colours mean; replicas are named where there are two."""
    found = {kind_of(span) for spans in panels.values() for span in spans}
    return {key: f"{key[1]}, replica {key[0]}" if len(found) > 2 else key[1] for key in COLOURS if key in found}


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, … that is not smaller.

    >>> round_step(0.3), round_step(7)
    (0.5, 10.0)
    """
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
