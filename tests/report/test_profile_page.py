"""The report of a profile: a table, and a page in a real Chromium with bars for every rank and step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chromium import Browser
from mural.comm.trace import Trace, Wait
from mural.errors import ConfigError
from mural.profile import Notes, Profile, StepAccount, page
from mural.profile.shares_page import words
from mural.report import plots
from pages import contrasts

KINDS = ["compute", "messages of halo", "idle", "images"]


def profile() -> Profile:
    """Two ranks that take two steps of ten seconds; in each, the first waits three seconds for the second."""
    steps = tuple(StepAccount(number, 10.0 * number, 10.0 * number + 10.0, 0.5) for number in (1, 2))
    waits = [Wait("halo", step.begin + 1.0, step.begin + 4.0, ((1, ("", step.number)),)) for step in steps]
    posts = {("", step.number): step.begin + 3.0 for step in steps}
    return Profile("a <model>", (Notes(0, steps, Trace(waits=waits)), Notes(1, steps, Trace(posts=posts))))


def test_the_table_names_every_rank_and_kind() -> None:
    ranks, messages = words(profile()).split("\n\n")
    head, *rows = ranks.splitlines()
    assert head.split() == ["rank", "step", "compute", "communication", "idle", "images"]
    assert [row.split()[:3] for row in rows] == [["0", "10.0", "s"], ["1", "10.0", "s"]]
    shares = " ".join(rows[0].split()[3:])
    assert shares == "6.50 s 65% 1.00 s 10% 2.00 s 20% 500 ms 5%"
    assert " ".join(messages.splitlines()[1].split()) == "messages of halo 500 ms 5% 1.00 s 10% 0"


def test_the_page_needs_nothing_else_and_escapes_names() -> None:
    drawn = page(profile())
    assert "a &lt;model&gt;" in drawn
    assert "http" not in drawn.replace(plots.script(), "").replace("http-equiv", "")


def test_the_page_has_a_bar_for_every_rank_and_step(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "profile.html").write_text(page(profile()))
    browser.errors.clear()
    browser.open(tmp_path / "profile.html")
    assert browser.errors == []
    traces = browser.value("document.querySelector('.js-plotly-plot').data.map((t) => [t.name ?? '', [...t.x].length])")
    assert traces == [*([kind, 2] for kind in KINDS), ["", 2], *([kind, 4] for kind in KINDS), ["", 4]]
    widths = browser.value("[...document.querySelectorAll('.barlayer .point path')].map((e) => e.getBBox().width)")
    assert sum(width > 0 for width in widths) == 3 * (4 + 2)  # the second rank computes and waits for images alone
    legend = browser.value("[...document.querySelectorAll('.legendtext')].map((e) => e.textContent)")
    assert legend == KINDS
    ticks = browser.value("[...document.querySelectorAll('.yaxislayer-above text')].map((e) => e.textContent)")
    assert {"rank 0", "rank 1", "step 1", "step 2"} <= set(ticks)
    assert browser.value("document.querySelectorAll('.bartext-outside').length") == 2 + 4
    assert "messages of halo: 1.00 s 10%" in browser.value(
        "document.querySelector('.js-plotly-plot').data.flatMap((trace) => trace.hovertext)"
    )
    assert min(contrasts(browser)) > 4.5


def test_without_plotly_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(ConfigError, match="pip install plotly"):
        page(profile())


def test_every_time_is_seen_whole_and_every_kind_looks_different(browser: Browser, tmp_path: Path) -> None:
    """The longest bars' times were cut off, and from the seventh kind on all had one colour."""
    step = StepAccount(1, 0.0, 10.0, 0.5)
    kinds = [f"kind {number}" for number in range(15)]
    waits = [Wait(kind, 0.5 * n, 0.5 * n + 0.4, ()) for n, kind in enumerate(kinds)]
    (tmp_path / "profile.html").write_text(page(Profile("many", (Notes(0, (step,), Trace(waits=waits)),))))
    traces = "document.querySelector('.js-plotly-plot').data.filter((trace) => trace.showlegend)"
    try:
        for width in (1280, 800):
            browser.resize(width, 900)
            browser.open(tmp_path / "profile.html")
            found = browser.value(f"{traces}.map((trace) => JSON.stringify(trace.marker))")
            assert len(set(found)) == len(found) == len(kinds) + 3
            ends = browser.value(
                "[...document.querySelectorAll('.bartext-outside')].map((e) => e.getBoundingClientRect().right)"
            )
            assert 0 < max(ends) <= browser.value("document.querySelector('.main-svg').getBoundingClientRect().right")
    finally:
        browser.resize(1280, 900)
