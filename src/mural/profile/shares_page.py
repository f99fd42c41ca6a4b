"""The report of a profile: a table for a terminal, and one HTML page with bars for every rank and step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import product
from typing import Any

from mural.profile.account import Profile, Shares
from mural.report import plots
from mural.report.shell import document
from mural.report.shell import table as html_table
from mural.report.words import aligned, seconds_in_words

COMPUTE, IDLE, DATA = "compute", "idle", "images"
ROOM = 80
"""Pixels to the right of the bars, for the time that the longest has at its end."""
PATTERNS = ("", "/", "x", ".", "+", "-", "|")
"""Kinds of messages with one colour have different ones of these."""


def table(profile: Profile) -> list[list[str]]:
    """Rows of text: a header, then the mean step of each rank with what it was made of."""
    rows = [["rank", "step", COMPUTE, "communication", IDLE, DATA]]
    for mean in profile.by_rank:
        parts = (mean.compute, mean.communicating, mean.idle, mean.data)
        rows.append([str(mean.rank), seconds_in_words(mean.seconds), *(part(s, mean.seconds) for s in parts)])
    return rows


def messages_table(profile: Profile) -> list[list[str]]:
    """Rows of text: a header, then each kind of communication with its part of the mean step."""
    means = profile.by_rank
    rows = [["communication", "mean of the ranks", "largest", "on rank"]]
    for kind in profile.kinds:
        times = [mean.communication.get(kind, 0.0) for mean in means]
        most = max(range(len(means)), key=times.__getitem__)
        average = part(sum(times) / len(times), sum(mean.seconds for mean in means) / len(means))
        rows.append([messages_of(kind), average, part(times[most], means[most].seconds), str(means[most].rank)])
    return rows


def messages_of(kind: str) -> str:
    """What a kind of communication is called: messages that an operation needs, not the operation itself."""
    return f"messages of {kind}"


def part(seconds: float, whole: float) -> str:
    """A time with its share.

    >>> part(0.025, 0.1)
    '25.0 ms 25%'
    """
    return f"{seconds_in_words(seconds)} {seconds / whole:.0%}" if whole > 0 else seconds_in_words(seconds)


def words(profile: Profile) -> str:
    """The tables as aligned text."""
    tables = [aligned(table(profile), right=range(6))]
    if profile.kinds:
        tables.append(aligned(messages_table(profile), right=range(1, 4)))
    return "\n\n".join("\n".join(lines) for lines in tables)


def page(profile: Profile) -> str:
    """One self-contained HTML page: the table, the mean step of each rank, and every step of each rank."""
    titles, counts = ["The mean step of each rank", "Every step"], [len(profile.by_rank), len(profile.shares)]
    figure = plots.figure(titles, counts, "milliseconds", barmode="stack")
    figure.update_layout(margin_r=ROOM)
    add_bars(figure, 1, profile.by_rank, profile.kinds, [f"rank {s.rank}" for s in profile.by_rank])
    names = [[f"rank {s.rank}" for s in profile.shares], [f"step {s.step}" for s in profile.shares]]
    add_bars(figure, 2, profile.shares, profile.kinds, names)
    tables = [table(profile), *([messages_table(profile)] if profile.kinds else [])]
    parts = [f"<p>{escape(profile.title)}</p>", *(html_table(head, rows) for head, *rows in tables), plots.html(figure)]
    return document("Profile", *parts, script=plots.script())


def add_bars(figure: Any, row: int, shares: Sequence[Shares], kinds: Sequence[str], names: Sequence[Any]) -> None:
    """Draw a bar for each of some steps, with a part for each thing that took time and the whole time at its end."""
    first, second, *others = plots.PALETTE
    every = product(PATTERNS, others)
    looks = {messages_of(kind): look for kind, look in zip(kinds, every, strict=False)}
    for kind, (pattern, colour) in {COMPUTE: ("", first), **looks, IDLE: ("", plots.GREY), DATA: ("", second)}.items():
        seconds = [seconds_by_name(s).get(kind, 0.0) for s in shares]
        figure.add_bar(
            x=[1000 * max(s, 0.0) for s in seconds],
            y=names,
            hovertext=[f"{kind}: {part(s, each.seconds)}" for s, each in zip(seconds, shares, strict=True)],
            marker_color=colour,
            marker_pattern_shape=pattern,
            **plots.named(kind, row),
        )
    whole = [seconds_in_words(each.seconds) for each in shares]
    at_the_end = {"orientation": "h", "textposition": "outside", "showlegend": False, "hoverinfo": "skip"}
    figure.add_bar(x=[0.0] * len(whole), y=names, text=whole, cliponaxis=False, row=row, col=1, **at_the_end)


def seconds_by_name(shares: Shares) -> dict[str, float]:
    """Where the seconds of a step went, by the names on the page."""
    messages = {messages_of(kind): seconds for kind, seconds in shares.communication.items()}
    return {COMPUTE: shares.compute, IDLE: shares.idle, DATA: shares.data, **messages}
