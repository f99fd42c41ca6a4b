"""The report of a profile: a table for a terminal, and one HTML page with bars for every rank and step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mural.profile.account import Profile, Shares

COMPUTE, IDLE, DATA = "compute", "idle", "images"
COLOURS = {COMPUTE: "#2f6db5", IDLE: "#9aa1ab", DATA: "#b4610d"}
KINDS = ("#1f7f6f", "#a13d78", "#6b5bb5", "#7d7a1e", "#b04545", "#3d7f9e")
"""Of kinds of communication; the last is that of all further ones."""
WIDTH, LEFT, ROW, GAP = 860, 90, 18, 5
STYLE = (
    "body{font:14px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse}td,th{padding:.15rem .7rem;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}tr+tr td{border-top:1px solid #8886}"
    ".wide{overflow-x:auto}svg{max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#808791}"
    ".key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .35em 0 1em}"
)


def table(profile: Profile) -> list[list[str]]:
    """Rows of text: a header, then the mean step of each rank with what it was made of."""
    head = ["rank", "step", COMPUTE, "communication", IDLE, DATA, *profile.kinds]
    return [head, *(row(shares, profile.kinds) for shares in profile.by_rank)]


def row(shares: Shares, kinds: Sequence[str]) -> list[str]:
    """One rank in words."""
    parts = [shares.compute, shares.communicating, shares.idle, shares.data]
    each = [shares.communication.get(kind, 0.0) for kind in kinds]
    return [str(shares.rank), milliseconds(shares.seconds), *(part(s, shares.seconds) for s in (*parts, *each))]


def part(seconds: float, whole: float) -> str:
    """A time with its share.

    >>> part(0.025, 0.1)
    '25.0 ms 25%'
    """
    return f"{milliseconds(seconds)} {seconds / whole:.0%}" if whole > 0 else milliseconds(seconds)


def milliseconds(seconds: float) -> str:
    """A time as a person reads it.

    >>> milliseconds(0.0123), milliseconds(2.5)
    ('12.3 ms', '2500 ms')
    """
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def words(profile: Profile) -> str:
    """The table as aligned text."""
    rows = table(profile)
    widths = [max(len(r[column]) for r in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(r, widths, strict=True)) for r in rows)


def page(profile: Profile) -> str:
    """One self-contained HTML page: the table, the mean step of each rank, and every step of each rank."""
    head, *rest = table(profile)
    cells = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in cells)}</tr>" for cells in rest)
    steps = "".join(
        f"<h3>rank {note.rank}</h3>{bars([s for s in profile.shares if s.rank == note.rank], 'step', profile.kinds)}"
        for note in profile.notes
    )
    return (
        f'<!doctype html><meta charset="utf-8"><title>Profile</title><style>{STYLE}</style>'
        f"<h1>Profile</h1><p>{escape(profile.title)}</p>"
        f"<p>{legend(profile.kinds)}</p>"
        f"<h2>The mean step of each rank</h2>{bars(profile.by_rank, 'rank', profile.kinds)}"
        f'<div class="wide"><table><tr>{"".join(f"<th>{escape(c)}</th>" for c in head)}</tr>{cells}</table></div>'
        f"<h2>Every step</h2>{steps}"
    )


def colours(kinds: Sequence[str]) -> dict[str, str]:
    """The colour of each part of a bar."""
    chosen = {kind: KINDS[min(number, len(KINDS) - 1)] for number, kind in enumerate(kinds)}
    return {COMPUTE: COLOURS[COMPUTE], **chosen, IDLE: COLOURS[IDLE], DATA: COLOURS[DATA]}


def legend(kinds: Sequence[str]) -> str:
    """What the colours mean."""
    return "".join(
        f'<span class="key" style="background:{colour}"></span>{escape(name)}'
        for name, colour in colours(kinds).items()
    )


def bars(shares: Sequence[Shares], label: str, kinds: Sequence[str]) -> str:
    """A drawing with a bar for each of some steps, all on one scale."""
    longest = max((s.seconds for s in shares), default=0.0) or 1.0
    scale = (WIDTH - LEFT - 70) / longest
    parts: list[str] = []
    for number, each in enumerate(shares):
        y, x = number * (ROW + GAP), float(LEFT)
        name = each.rank if label == "rank" else each.step
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{label} {name}</text>')
        for kind, colour in colours(kinds).items():
            seconds = seconds_of(each, kind)
            width = max(seconds, 0.0) * scale
            tip = f"{kind}: {part(seconds, each.seconds)}"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{colour}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            x += width
        parts.append(f'<text x="{x + 6:.2f}" y="{y + 13}">{milliseconds(each.seconds)}</text>')
    height = len(shares) * (ROW + GAP)
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">{"".join(parts)}</svg>'


def seconds_of(shares: Shares, kind: str) -> float:
    """The time of one part of a step."""
    known = {COMPUTE: shares.compute, IDLE: shares.idle, DATA: shares.data}
    return known[kind] if kind in known else shares.communication.get(kind, 0.0)
