"""The page of a run: what became of it, its curves and pictures, how fast it was, and what was run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from mural.report import curves, plots
from mural.report.class_maps import Legend, Panel, PictureRow, data_uri
from mural.report.curves import CurveChart
from mural.report.shell import asset, page, table

STYLE = "run_page.css"
ENLARGE = """
document.addEventListener("click", (event) => {
  const button = event.target.closest(".pictures button");
  if (button) button.closest("figure").classList.toggle("large");
});
"""
"""Lets a picture grow to the width of the page, and shrink again."""
SMALL = 300
"""Pixels of a picture's longer side up to which it is shown with visible pixels."""


@dataclass(frozen=True)
class Headline:
    """How a run stands, in one sentence, with what there is to say of it; and the facts that matter most."""

    mood: Literal["good", "busy", "bad"]
    words: str
    more: Sequence[str]
    facts: Sequence[tuple[str, str, str]]
    """What it is, the fact, and a remark."""


@dataclass(frozen=True)
class Gallery:
    """Pictures with their legend; or, without any, how to get some."""

    rows: Sequence[PictureRow]
    legend: Legend
    remarks: Sequence[str]
    command: str = ""


@dataclass(frozen=True)
class TextTable:
    """A table with its title, and remarks below it; the first row names the columns, if there is a `head`."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class RunPage:
    """Everything on the page."""

    title: str
    headline: Headline
    charts: Sequence[CurveChart]
    resumed: Sequence[int]
    """Steps at which the run was started again."""
    gallery: Gallery
    speed: Sequence[TextTable]
    about: Sequence[TextTable]
    changed: str
    """The configuration as TOML, without what is a default."""
    config: str
    """All of it."""


def html(run: RunPage) -> str:
    """One self-contained HTML page."""
    parts = [
        f"<h1>{escape(run.title)}</h1>",
        *headline(run.headline),
        "<h2>Curves</h2>",
        *drawn_curves(run),
        "<h2>Pictures</h2>",
        *pictures(run.gallery),
        "<h2>Speed and memory</h2>",
        *(line for part in run.speed for line in text_table(part)),
        "<h2>What was run</h2>",
        *(line for part in run.about for line in text_table(part)),
        "<h3>Configuration: what differs from the defaults</h3>",
        f"<pre>{escape(run.changed)}</pre>",
        f"<details><summary>All of it, as in config.toml</summary><pre>{escape(run.config)}</pre></details>",
    ]
    body = "\n".join(['<main class="document">', *parts, "</main>"])
    return page(run.title, body, asset(STYLE), (plots.script() if run.charts else "") + ENLARGE)


def is_report(text: str) -> bool:
    """Whether a text is, or begins as, a page of this kind."""
    return asset(STYLE).splitlines()[0] in text


def headline(found: Headline) -> list[str]:
    """How the run stands."""
    lines = "".join(f"<p>{escape(text)}</p>" for text in (found.words, *found.more))
    cards = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(fact)}</b><span>{escape(remark)}</span></div>"
        for name, fact, remark in found.facts
    )
    return [f'<div class="state {found.mood}">{lines}</div>', f'<div class="facts">{cards}</div>']


def drawn_curves(run: RunPage) -> list[str]:
    """The charts."""
    if not run.charts:
        return ["<p>No step was logged yet.</p>"]
    dotted = "<p>Dotted lines: the run was started again from a checkpoint.</p>" if run.resumed else ""
    return [curves.html(run.charts, run.resumed), dotted]


def pictures(gallery: Gallery) -> list[str]:
    """The pictures of images, with what their colours mean."""
    found = [f"<p>{escape(text)}</p>" for text in gallery.remarks]
    if gallery.command:
        found.append(f"<pre>{escape(gallery.command)}</pre>")
    if gallery.legend and gallery.rows:
        entries = (f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for colour, name in gallery.legend)
        found.append(f'<ul class="legend">{"".join(entries)}</ul>')
    if gallery.rows:
        found.append('<p class="quiet">Click on a picture to enlarge it.</p>')
    for row in gallery.rows:
        panels = "".join(map(figure, row.panels))
        found.append(f'<h3>{escape(row.name)}</h3>\n<div class="pictures">{panels}</div>')
        found.append(f'<p class="quiet">{escape(row.caption)}</p>')
    return found


def figure(panel: Panel) -> str:
    """One picture."""
    small = ' class="small"' if max(panel.image.size) <= SMALL else ""
    width, height = panel.image.size
    image = f'<img{small} src="{data_uri(panel)}" alt="{escape(panel.title)}" width="{width}" height="{height}">'
    return f"<figure><button>{image}</button><figcaption>{escape(panel.title)}</figcaption></figure>"


def text_table(part: TextTable) -> list[str]:
    """A table, with words in its cells unless it has a head."""
    title = [f"<h3>{escape(part.title)}</h3>"] if part.title else []
    if part.head:
        lines = table(part.head, part.rows)
    else:
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in part.rows)
        lines = f'<table class="words">{"".join(f"<tr>{row}</tr>" for row in rows)}</table>'
    return [*title, lines, *(f'<p class="quiet">{escape(text)}</p>' for text in part.remarks)]
