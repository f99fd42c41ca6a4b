"""What tests of pages share: how well words can be read in a real Chromium, and a model that a plan refuses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chromium import Browser

LIGHT = """(colour) => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
  const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
}"""
"""How light a colour is, as WCAG counts."""


def contrasts(browser: Browser) -> list[float]:
    """The contrast of each word outside of bars with the page, on a light and on a dark screen."""
    script = f"""(() => {{
      const light = {LIGHT};
      const paper = light(getComputedStyle(document.body).backgroundColor);
      return [...document.querySelectorAll('h1, td, p, .infolayer text, [class*="axislayer"] text, .bartext-outside')]
        .map((e) => light(getComputedStyle(e)[e instanceof SVGElement ? 'fill' : 'color']))
        .map((ink) => Math.max(ink, paper) / Math.min(ink, paper));
    }})()"""
    found: list[float] = []
    for dark in (True, False):
        browser.dark(dark)
        found += browser.value(script)
    return found


class Inverse(nn.Module):
    """A convolution, and an operation that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.conv(x))
