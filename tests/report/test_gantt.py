"""Gantt charts: as text, as a page in a real Chromium, and as the SVG of the benchmark of schedules."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from chromium import Browser
from mural.pipeline.gems import gems
from mural.pipeline.schedule import Schedule, one_f_one_b
from mural.pipeline.timeline import ActionSpan, StageCosts, simulate
from mural.pipeline.transfers import Edge, with_messages
from mural.report.gantt import html, text
from pages import contrasts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "schedules"))
    return importlib.import_module("gantt_figure")


def played(schedule: Schedule) -> tuple[ActionSpan, ...]:
    """The spans of a schedule: forward 1 and backward 2 on every stage."""
    program = with_messages(schedule, [Edge((s, 0), s, (s + 1,)) for s in range(schedule.stages - 1)])
    return simulate(program, StageCosts((1.0,) * schedule.stages, (2.0,) * schedule.stages)).spans


def two_panels() -> dict[str, list[ActionSpan]]:
    """Four stages of two replicas, and the same half as fast."""
    predicted = list(played(gems(4, 2)))
    return {
        "predicted": predicted,
        "measured": [replace(span, start=1.5 * span.start, end=1.5 * span.end) for span in predicted],
    }


def test_text_without_a_unit_has_a_hundred_columns() -> None:
    rows = text(played(one_f_one_b(3, 4))).splitlines()
    assert {len(row) for row in rows} == {100}
    assert text([]) == ""


def test_svg_shows_both_on_one_axis_and_says_what_each_bar_is(figure: ModuleType) -> None:
    panels = two_panels()
    root = ElementTree.fromstring(figure.svg(panels, "GEMS <4 stages>"))
    name = "{http://www.w3.org/2000/svg}"
    bars = root.findall(f"{name}g")
    half = len(panels["predicted"])
    assert len(bars) == 2 * half
    widths = [float(bar.find(f"{name}rect").get("width", "0")) for bar in bars]  # pyright: ignore[reportOptionalMemberAccess]
    assert all(b == pytest.approx(1.5 * a, abs=0.5) for a, b in zip(widths[:half], widths[half:], strict=True))
    words = [node.text or "" for node in root.iter(f"{name}text")]
    assert {"predicted: 12 s", "measured: 18 s", "GEMS <4 stages>", "seat 3", "forward, replica 1"} <= set(words)
    assert "backward of stage 3, micro-batch 0: 4 to 6" in [t.text for t in root.iter(f"{name}title")]
    assert "http" not in figure.svg(panels, "GEMS").replace("http://www.w3.org/2000/svg", "")


def test_svg_of_one_timeline_and_of_none(figure: ModuleType) -> None:
    ElementTree.fromstring(figure.svg({"predicted": played(one_f_one_b(2, 12))}, "1F1B"))
    ElementTree.fromstring(figure.svg({"predicted": []}, "nothing"))
    ElementTree.fromstring(figure.svg({}, "nothing"))


def test_the_page_shows_both_on_one_axis_and_says_what_each_bar_is(browser: Browser, tmp_path: Path) -> None:
    panels = two_panels()
    (tmp_path / "gantt.html").write_text(html(panels, "GEMS <4 stages>"))
    browser.errors.clear()
    browser.open(tmp_path / "gantt.html")
    assert browser.errors == []
    lengths = browser.value("[...document.querySelectorAll('.barlayer .point path')].map((p) => p.getBBox().width)")
    assert len(lengths) == 2 * len(panels["predicted"])
    half = len(lengths) // 2
    assert sum(lengths[half:]) == pytest.approx(1.5 * sum(lengths[:half]), rel=0.01)
    told = browser.value(
        "[...document.querySelectorAll('h1, .infolayer text, .yaxislayer-above text')].map((t) => t.textContent)"
    )
    assert {"predicted: 12 s", "measured: 18 s", "GEMS <4 stages>", "seat 3", "forward, replica 1"} <= set(told)
    said = browser.value("document.querySelector('.js-plotly-plot').data.flatMap((trace) => trace.hovertext)")
    assert "backward of stage 3, micro-batch 0: 4 to 6" in said
    assert min(contrasts(browser)) > 4.5
