"""The page of a graph in a real Chromium: what is drawn, what opens, what is found, and that nothing overlaps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.vision import torchvision
from torch import nn

from chromium import Browser
from mural.graph import Graph, capture
from mural.models import UNet, amoebanetd, resnet1001_v2
from mural.report.graph_drawing.draw import draw
from mural.report.graph_drawing.outline import outline
from pages import LIGHT, Inverse

SITES = "[...document.querySelectorAll('.box')].map((box) => box.getAttribute('aria-label').split(',')[0])"
CLOSED = "document.querySelectorAll('.box:not(.opened):not(.value)').length"

PIECES = """
  const found = [];
  const place = (e) => e.getBoundingClientRect();
  const opened = [...document.querySelectorAll('.box.opened')];
  const isBox = (e) => e.classList.contains('box');
  const inside = (e) => [...e.children].filter(isBox).map((c) => [c, c.querySelector('rect.body')]);
"""

# Boxes that overlap without one lying in the other, and texts that leave their box.
OVERLAPS = f"""(() => {{ {PIECES}
  for (const around of opened) {{
    const outer = place(around.querySelector('rect.body'));
    const boxes = inside(around).map(([e, body]) => [e, place(body)]).sort(([, a], [, b]) => a.top - b.top);
    boxes.forEach(([e, a], i) => {{
      const within = outer.left < a.left && a.right < outer.right && outer.top < a.top && a.bottom < outer.bottom;
      if (!within) found.push(e.ariaLabel);
      for (const [f, b] of boxes.slice(i + 1)) {{
        if (b.top < a.bottom && a.left < b.right && b.left < a.right) found.push(e.ariaLabel + ' / ' + f.ariaLabel);
      }}
    }});
  }}
  for (const text of document.querySelectorAll('.box > text:not(.found)')) {{
    const a = place(text), b = place(text.parentNode.querySelector('rect.body'));
    if (a.left < b.left || a.right > b.right || a.bottom > b.bottom) found.push('text ' + text.textContent);
  }}
  return found;
}})()"""

# Titles of open boxes that a line goes through.
CROSSED = f"""(() => {{ {PIECES}
  for (const around of opened) {{
    const title = around.querySelector(':scope > text').getBBox();
    for (const path of around.querySelectorAll(':scope > .net > path')) {{
      for (let at = 0; at < path.getTotalLength(); at += 3) {{
        const {{ x, y }} = path.getPointAtLength(at);
        const across = x > title.x && x < title.x + title.width;
        if (across && y > title.y && y < title.y + title.height) found.push(around.ariaLabel);
      }}
    }}
  }}
  return [...new Set(found)];
}})()"""

# Lines that go through a box that they neither begin nor end in.
STRUCK = f"""(() => {{ {PIECES}
  for (const around of opened) {{
    const boxes = inside(around).map(([e, body]) => [e, body.getBBox(), e.transform.baseVal[0].matrix]);
    for (const path of around.querySelectorAll(':scope > .net > path')) {{
      const length = path.getTotalLength();
      for (let at = 3; at < length - 3; at += 15) {{
        const point = path.getPointAtLength(at);
        for (const [e, box, matrix] of boxes) {{
          const x = point.x - matrix.e, y = point.y - matrix.f;
          if (x > 1 && x < box.width - 1 && y > 1 && y < box.height - 1) found.push(e.ariaLabel);
        }}
      }}
    }}
  }}
  return [...new Set(found)];
}})()"""


def captured(model: nn.Module, side: int) -> Graph:
    return capture(model, (1, 3, side, side))


@pytest.fixture(scope="module")
def densenet() -> Graph:
    with torch.device("meta"):
        return captured(torchvision.models.densenet121(), 224)


@pytest.fixture(scope="module")
def unet() -> Graph:
    with torch.device("meta"):
        return captured(UNet(), 256)


def opened(browser: Browser, graph: Graph, folder: Path, **how: Any) -> Browser:
    """The browser with the page of a graph, which has nothing to complain about."""
    browser.errors.clear()
    draw(graph, folder / "graph.html", **how)
    browser.open(folder / "graph.html")
    assert browser.errors == []
    return browser


@pytest.mark.slow
def test_densenet_opens_folded_and_unfolds_to_one_box_for_each_layer(
    browser: Browser, densenet: Graph, tmp_path: Path
) -> None:
    page = opened(browser, densenet, tmp_path)
    shown = outline(densenet)
    assert page.value(CLOSED) == 16
    assert page.value("document.querySelector('.box[aria-label^=\"features.denseblock1,\"]').ariaExpanded") == "false"
    for level in ("module", "block", "layer"):
        page.click(f"[data-level={level}]")
        seen = [box for box in shown.shown(shown.opened(level)) if box.id not in shown.opened(level)]
        assert page.value(CLOSED) == sum(box.role not in ("input", "output") for box in seen)
    assert page.value("document.querySelectorAll('.box.layer').length") == len(densenet) == 429 + 2
    assert page.value("document.querySelectorAll('.box.value').length") == 2
    page.click("[data-level=module]")
    assert page.value("document.querySelectorAll('.box').length") == 8
    assert page.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("level", ["block", "layer"])
def test_nothing_overlaps_in_densenet(browser: Browser, densenet: Graph, tmp_path: Path, level: Any) -> None:
    page = opened(browser, densenet, tmp_path, level=level, stages=4)
    assert page.value(OVERLAPS) == []
    assert page.value(STRUCK) == []
    assert page.value(CROSSED) == []


@pytest.mark.slow
@pytest.mark.parametrize("layers", [6, pytest.param(18, marks=pytest.mark.slow)])
def test_amoebanet_is_legible(browser: Browser, tmp_path: Path, layers: int) -> None:
    with torch.device("meta"):
        graph = captured(amoebanetd(layers, 16), 64)
    page = opened(browser, graph, tmp_path, stages=3)
    assert page.value(CLOSED) == layers + 6  # the cells of the stem and those that reduce, its first layers, the scores
    assert page.value("document.querySelector('#drawing').getBoundingClientRect().width") < 960
    for level in ("module", "block", "layer"):
        page.click(f"[data-level={level}]")
        assert page.value(OVERLAPS) == []
        assert page.value(STRUCK) == []
        assert page.value(CROSSED) == []
    assert page.value("document.querySelectorAll('.box.layer').length") == len(graph)
    assert page.errors == []


def test_a_click_opens_a_block_and_another_closes_it(browser: Browser, unet: Graph, tmp_path: Path) -> None:
    page = opened(browser, unet, tmp_path)
    before = page.value(SITES)
    page.click('.box[aria-label^="stem,"] > text')
    assert set(page.value(SITES)) - set(before) == {f"stem.{i}" for i in range(6)}
    shown = outline(unet)
    stem = next(box for box in shown.boxes if box.site == "stem")
    assert page.value("document.querySelector('#panel h2').textContent") == "stem"
    told = page.value("document.querySelector('#panel dl').textContent")
    assert f"parameters{shown.parameters(stem.start, stem.stop):,}" in told
    assert f"FLOPs{shown.flops(stem.start, stem.stop):,}" in told
    page.click('.box[aria-label^="stem,"] > text')
    assert page.value(SITES) == before
    assert page.errors == []


def test_forward_order_is_from_top_to_bottom(browser: Browser, unet: Graph, tmp_path: Path) -> None:
    page = opened(browser, unet, tmp_path, level="layer")
    tops = page.value(
        "[...document.querySelectorAll('.box.layer')]"
        ".map((box) => [Number(box.dataset.id), box.getBoundingClientRect().top])"
    )
    top = dict(tops)
    shown = outline(unet)
    assert all(top[a] < top[b] for a, b in shown.edges if a in top and b in top)
    arrows = page.value("document.querySelectorAll('path.to').length")
    assert arrows == sum(len(net.targets) for nets in shown.nets.values() for net in nets)


def test_search_finds_opens_and_shows(browser: Browser, densenet: Graph, tmp_path: Path) -> None:
    page = opened(browser, densenet, tmp_path)
    page.press("/")
    page.write("denseblock3.denselayer7 conv2d")
    assert page.value("document.querySelector('#count').textContent") == "1 of 2"
    assert page.value("document.querySelector('.box.selected').ariaLabel").startswith(
        "features.denseblock3.denselayer7.conv1, Conv2d"
    )
    assert page.value(
        "(() => { const box = document.querySelector('.box.selected').getBoundingClientRect();"
        "const paper = document.querySelector('#paper').getBoundingClientRect();"
        "return box.top >= paper.top && box.bottom <= paper.bottom && box.left >= paper.left; })()"
    )
    page.press("Enter")
    assert "denselayer7.conv2" in page.value("document.querySelector('.box.selected').ariaLabel")
    assert page.value("document.querySelector('#count').textContent") == "2 of 2"
    for asked, count in (
        ("1x1024x7x7", 3),
        ("(1, 1024, 7, 7)", 3),
        ("max_pool2d", 1),
        ("BATCHNORM2D ×28×28", 25),
        ("no such", 0),
    ):
        page.value(
            f"(() => {{ const query = document.querySelector('#query'); query.value = {asked!r};"
            "query.dispatchEvent(new Event('input')); })()"
        )
        told = page.value("document.querySelector('#count').textContent")
        assert told == (f"1 of {count}" if count else "nothing found"), asked
        assert page.value("document.querySelectorAll('.box.match').length") <= count
    page.press("Escape")
    assert page.value("document.querySelectorAll('.box.match, rect.found').length") == 0
    assert page.errors == []


def test_stages_have_colours_and_a_legend(browser: Browser, unet: Graph, tmp_path: Path) -> None:
    page = opened(browser, unet, tmp_path, stages=["down.1", "up"], level="layer")
    colours = page.value(
        "[...document.querySelectorAll('.box.layer')].map((box) => [Number(box.dataset.id),"
        "getComputedStyle(box.querySelector('rect.body')).fill])"
    )
    shown = outline(unet)
    starts = [next(box.start for box in shown.boxes if box.site == site) for site in ("down.1", "up")]
    stage = {box: sum(shown.boxes[box].start >= start for start in starts) for box, _ in colours}
    by_stage = [{colour for box, colour in colours if stage[box] == number} for number in range(3)]
    assert all(len(found) == 1 for found in by_stage)
    assert len(set.union(*by_stage)) == 3
    legend = page.value("[...document.querySelectorAll('#legend button')].map((button) => button.textContent)")
    assert [text.partition(":")[0] for text in legend] == ["stage 0", "stage 1", "stage 2"]
    assert page.value("document.querySelectorAll('path.across').length") > 0
    page.click("#legend button")
    assert page.value("document.querySelectorAll('.box.dimmed').length") > 0
    page = opened(browser, unet, tmp_path)
    assert page.value("document.querySelector('#legend').hidden && !document.querySelector('.staged, .across')")


def test_keys_walk_open_and_close(browser: Browser, unet: Graph, tmp_path: Path) -> None:
    page = opened(browser, unet, tmp_path)
    selected = "document.querySelector('.box.selected')?.ariaLabel.split(',')[0]"
    page.value("document.querySelector('.box[tabindex=\"0\"]').focus()")
    page.press("ArrowDown")
    page.press("ArrowDown")
    assert page.value(selected) == "stem"
    page.press("Enter")
    page.press("ArrowRight")
    assert page.value(selected) == "stem.0"
    assert page.value("document.activeElement.ariaLabel").startswith("stem.0")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert page.value(f"{selected} + document.querySelector('.box.selected').ariaExpanded") == "stemfalse"
    wide = page.value("document.querySelector('#drawing').width.baseVal.value")
    page.press("+")
    assert page.value("document.querySelector('#drawing').width.baseVal.value") == pytest.approx(1.25 * wide)
    page.press("3")
    assert page.value("document.querySelectorAll('.box.layer').length") == len(unet)
    assert page.errors == []


def test_keys_work_at_once_and_what_a_plan_refuses_is_red(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, capture(Inverse(), (1, 3, 8, 8)), tmp_path)
    page.press("ArrowDown")
    assert page.value("document.querySelector('.box.selected').ariaLabel").startswith("x")
    assert page.value("document.querySelector('h1 em').textContent") == "1 operations without a rule"
    words, box = (f"getComputedStyle(document.querySelector('{name}'))" for name in ("h1 em", ".refused > rect.body"))
    assert page.value(f"{words}.color") == page.value(f"{box}.stroke")
    assert page.errors == []


def test_light_and_dark_have_contrast(browser: Browser, unet: Graph, tmp_path: Path) -> None:
    page = opened(browser, unet, tmp_path, stages=4, level="layer")
    contrast = (
        """(() => {
      const light = """
        + LIGHT
        + """;
      return Math.min(...[...document.querySelectorAll('.box.layer')].flatMap((box) => {
        const fill = light(getComputedStyle(box.querySelector('rect.body')).fill);
        return [...box.querySelectorAll('text, tspan')].map((text) => light(getComputedStyle(text).fill))
          .map((ink) => Math.max(ink, fill) / Math.min(ink, fill));
      }));
    })()"""
    )
    for dark in (False, True):
        browser.dark(dark)
        assert page.value(contrast) > 4.5
    browser.dark(False)


@pytest.mark.slow
def test_a_thousand_layers_open_at_once(browser: Browser, tmp_path: Path) -> None:
    with torch.device("meta"):
        graph = captured(resnet1001_v2(), 32)
    draw(graph, tmp_path / "graph.html")
    begin = time.monotonic()
    page = opened(browser, graph, tmp_path)
    page.value("document.querySelector('#drawing').getBoundingClientRect().height")
    assert time.monotonic() - begin < 10
    assert page.value("document.querySelectorAll('.box').length") < 40
    page.click("[data-level=layer]")
    assert page.value("document.querySelectorAll('.box.layer').length") == len(graph) > 3000
    assert page.errors == []
