"""Gantt charts of spans, predicted and measured: as plain text, and as SVG that reads on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

from mural.pipeline.schedule import Action
from mural.pipeline.timeline import Span

# Dark enough for white letters, and apart from white and from black alike; by replica and kind.
COLOURS = {
    (0, "forward"): "#2f6db5",
    (0, "backward"): "#b4610d",
    (1, "forward"): "#1f7f6f",
    (1, "backward"): "#a13d78",
}
GREY = "#808791"
"""Of words and lines: as far from white as from black."""
WIDTH, LEFT, ROW, GAP = 960, 64, 22, 4


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
    end = max((span.end for span in spans), default=0.0)
    unit = unit or end / 100 or 1.0
    columns = ceil(end / unit - 1e-9)
    rows = [["."] * columns for _ in range(1 + max((span.seat for span in spans), default=-1))]
    for span in spans:
        # The columns whose middle lies in [start, end).
        first, last = ceil(span.start / unit - 0.5), ceil(span.end / unit - 0.5)
        for column in range(max(0, first), min(columns, last)):
            rows[span.seat][column] = letter(span.action)
    return "\n".join(map("".join, rows))


def svg(predicted: Sequence[Span], measured: Sequence[Span] = (), title: str = "", unit: str = "s") -> str:
    """A self-contained chart: a row for each seat, predicted above measured (where given), on one axis of time."""
    both = {"predicted": predicted, "measured": measured}
    return chart({name: spans for name, spans in both.items() if spans}, title, unit)


def chart(panels: Mapping[str, Sequence[Span]], title: str = "", unit: str = "s") -> str:
    """A self-contained SVG with a panel for each list of spans, all on one axis of time; `unit` is that of the times.

    A panel has a row for each seat. Each bar says what it is when pointed at.
    """
    end = max((span.end for spans in panels.values() for span in spans), default=0.0) or 1.0
    scale = (WIDTH - LEFT - 12) / end
    body: list[str] = []
    y = 8
    if title:
        body.append(f'<text x="{LEFT}" y="{y + 12}" class="head">{escape(title)}</text>')
        y += 24
    for name, spans in panels.items():
        last = max((span.end for span in spans), default=0.0)
        body += panel(f"{name}: {seconds(last)} {unit}", spans, y, scale)
        y += height_of(spans) + 30
    body += axis(end, scale, y)
    body.append(f'<text x="{LEFT - 8}" y="{y + 16}" class="seat">{escape(unit)}</text>')
    found = {(s.action.replica % 2, s.action.kind) for spans in panels.values() for s in spans}
    body += legend([kind for kind in COLOURS if kind in found], y + 40)
    style = (
        f"text{{font:11px system-ui,sans-serif;fill:{GREY}}} .head{{font-size:13px;font-weight:600}} "
        f".in{{fill:#fff;text-anchor:middle}} .seat{{text-anchor:end}} line{{stroke:{GREY};stroke-width:1}}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 52}" width="{WIDTH}" role="img">',
            f"<title>{escape(title or 'Gantt chart of a pipeline')}</title>",
            f"<style>{style}</style>",
            *body,
            "</svg>\n",
        ]
    )


def height_of(spans: Sequence[Span]) -> int:
    """The height of the rows of a panel."""
    return (1 + max((span.seat for span in spans), default=-1)) * (ROW + GAP)


def panel(words: str, spans: Sequence[Span], y: int, scale: float) -> list[str]:
    """The bars of one list of spans, below its words, with the names of the seats."""
    parts = [f'<text x="{LEFT}" y="{y + 12}" class="head">{escape(words)}</text>']
    y += 20
    for top in range(y, y + height_of(spans), ROW + GAP):
        middle, seat = top + ROW / 2, (top - y) // (ROW + GAP)
        parts.append(f'<text x="{LEFT - 8}" y="{middle + 4:g}" class="seat">seat {seat}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{middle:g}" y2="{middle:g}" opacity="0.35"/>')
    return parts + [bar(span, y, scale) for span in spans]


def bar(span: Span, y: int, scale: float) -> str:
    """One action."""
    action = span.action
    x, width, top = LEFT + span.start * scale, (span.end - span.start) * scale, y + span.seat * (ROW + GAP)
    words = f"{action}: {seconds(span.start)} to {seconds(span.end)}"
    label = str(action.microbatch) if width > 8 * len(str(action.microbatch)) else ""
    number = f'<text x="{x + width / 2:.2f}" y="{top + 15}" class="in">{label}</text>' if label else ""
    return (
        f'<g><title>{escape(words)}</title><rect x="{x:.2f}" y="{top}" width="{max(width - 0.6, 0.4):.2f}" '
        f'height="{ROW}" rx="2" fill="{COLOURS[action.replica % 2, action.kind]}"/>{number}</g>'
    )


def axis(end: float, scale: float, y: int) -> list[str]:
    """The axis of time, with round numbers."""
    parts = [f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y}" y2="{y}"/>']
    step = round_step(end / 8)
    for number in range(floor(end / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{y + 4}"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 16}" text-anchor="middle">{number * step:.6g}</text>')
    return parts


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, … that is not smaller.

    >>> round_step(0.3), round_step(7)
    (0.5, 10.0)
    """
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def legend(kinds: Sequence[tuple[int, str]], y: int) -> list[str]:
    """What the colours mean; replicas are named where there are two."""
    parts: list[str] = []
    for number, (replica, kind) in enumerate(kinds):
        x = LEFT + 150 * number
        words = f"{kind}, replica {replica}" if len(kinds) > 2 else kind
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{COLOURS[replica, kind]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{words}</text>')
    return parts


def seconds(value: float) -> str:
    """A time with four digits.

    >>> seconds(0.123456), seconds(12.0)
    ('0.1235', '12')
    """
    return f"{value:.4g}"
