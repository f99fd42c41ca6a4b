"""Gantt charts of spans, predicted and measured: as plain text, and as a page to zoom into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from mural.pipeline.schedule import Action
from mural.pipeline.timeline import ActionSpan
from mural.report import plots
from mural.report.shell import document

Panels = Mapping[str, Sequence[ActionSpan]]
"""Lists of spans by their names, all drawn on one axis of time."""

KINDS = [(replica, kind) for replica in (0, 1) for kind in ("forward", "backward")]
COLOURS = dict(zip(KINDS, plots.PALETTE, strict=False))
"""By replica and kind."""


def letter(action: Action) -> str:
    """An action as one character: a digit for a forward, a letter for a backward, of the micro-batch's number.

    >>> letter(Action("forward", 0, 12)), letter(Action("backward", 0, 2))
    ('2', 'c')
    """
    if action.kind == "forward":
        return str(action.microbatch % 10)
    return chr(ord("a") + action.microbatch % 26)


def text(spans: Iterable[ActionSpan], unit: float | None = None) -> str:
    """A row for each seat, a character for each unit of time: what the seat did in the middle of it, a dot if nothing.

    Without `unit`, a hundredth of the whole time. Digits are forwards and letters backwards, by micro-batch.

    >>> forward, backward = Action("forward", 0, 0), Action("backward", 1, 0)
    >>> print(text([ActionSpan(0, forward, 0, 1), ActionSpan(1, backward, 1, 3)], unit=1))
    0..
    .aa
    """
    spans = list(spans)
    unit = unit or end_of(spans) / 100 or 1.0
    columns = ceil(end_of(spans) / unit - 1e-9)
    rows = [["."] * columns for _ in range(seats(spans))]
    for span in spans:
        # The columns whose middle is in [start, end).
        first, last = ceil(span.start / unit - 0.5), ceil(span.end / unit - 0.5)
        for column in range(max(0, first), min(columns, last)):
            rows[span.seat][column] = letter(span.action)
    return "\n".join(map("".join, rows))


def html(panels: Panels, title: str, unit: str = "s") -> str:
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


def end_of(spans: Sequence[ActionSpan]) -> float:
    """When the last span ends."""
    return max((span.end for span in spans), default=0.0)


def seats(spans: Sequence[ActionSpan]) -> int:
    """How many rows a panel has."""
    return 1 + max((span.seat for span in spans), default=-1)


def kind_of(span: ActionSpan) -> tuple[int, str]:
    """What a span's colour depends on."""
    return span.action.replica % 2, span.action.kind


def words_of(span: ActionSpan) -> str:
    """What a bar says."""
    return f"{span.action}: {span.start:.4g} to {span.end:.4g}"


def legend(panels: Panels) -> dict[tuple[int, str], str]:
    """What the colours mean; replicas are named where there are two."""
    found = {kind_of(span) for spans in panels.values() for span in spans}
    return {key: f"{key[1]}, replica {key[0]}" if len(found) > 2 else key[1] for key in COLOURS if key in found}
