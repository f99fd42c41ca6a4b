"""Drawings as SVG, written with the standard library alone: rectangles, circles, words, lines and arrows."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from math import hypot
from typing import Literal

PAPER, WHITE, INK, QUIET, SHARED, RED = "#fcfcfa", "#ffffff", "#1b1f24", "#59636e", "#e6e6e2", "#c0261c"
FILLS = ("#cfe3f7", "#fbdfb9", "#cdebd8", "#ecd6f0")
LINES = ("#14569c", "#a34f00", "#17703f", "#7d3691")
"""A light and a dark colour for each rank."""


class Drawing:
    """An SVG on a light ground of its own, so that it reads on white and on dark pages."""

    def __init__(self, title: str, width: int, height: int):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' role="img" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]

    def _add(self, tag: str, fill: str, line: str, width: float, dash: bool) -> None:
        dashes = ' stroke-dasharray="5 4"' if dash else ""
        self.parts.append(f'<{tag} fill="{fill}" stroke="{line}" stroke-width="{width:g}"{dashes}/>')

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, line: str = INK, width: float = 1.2, dash: bool = False
    ) -> None:
        """A rectangle."""
        self._add(f'rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"', fill, line, width, dash)

    def circle(self, x: float, y: float, radius: float, fill: str, line: str = INK, width: float = 1.2) -> None:
        """A circle around a point."""
        self._add(f'circle cx="{x:g}" cy="{y:g}" r="{radius:g}"', fill, line, width, dash=False)

    def line(
        self, x: float, y: float, x2: float, y2: float, color: str = INK, width: float = 1.3, dash: bool = False
    ) -> None:
        """A straight line."""
        self._add(f'line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}"', "none", color, width, dash)

    def arrow(self, points: Sequence[tuple[float, float]], color: str = INK) -> None:
        """A line through points, with a head at its end."""
        for (x, y), (x2, y2) in pairwise(points):
            self.line(x, y, x2, y2, color, 2)
        (x, y), (x2, y2) = points[-2:]
        length = hypot(x2 - x, y2 - y)
        dx, dy = (x2 - x) / length, (y2 - y) / length
        back = [(x2 - 9 * dx - 5 * s * dy, y2 - 9 * dy + 5 * s * dx) for s in (-1, 1)]
        corners = " ".join(f"{a:g},{b:g}" for a, b in [(x2, y2), *back])
        self.parts.append(f'<polygon points="{corners}" fill="{color}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        color: str = INK,
        bold: bool = False,
        anchor: Literal["start", "middle", "end"] = "start",
        size: int = 15,
    ) -> None:
        """Words with their base line at y, which start, have their middle or end at x."""
        style = ' font-weight="bold"' * bold + f' text-anchor="{anchor}"' * (anchor != "start")
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}"{style}>{escape(words)}</text>')

    def cell(
        self, x: float, y: float, w: float, h: float, words: object, fill: str, line: str = INK, dash: bool = False
    ) -> None:
        """A rectangle with a word in its middle."""
        self.rect(x, y, w, h, fill, line, dash=dash)
        self.text(x + w / 2, y + h / 2 + 5, str(words).replace("-", "−"), anchor="middle")

    @contextmanager
    def saying(self, words: str) -> Generator[None]:
        """What is drawn inside the block says these words when pointed at."""
        start = len(self.parts)
        yield
        self.parts[start:] = [f"<g><title>{escape(words)}</title>{''.join(self.parts[start:])}</g>"]

    def svg(self) -> str:
        """The file's text."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"
