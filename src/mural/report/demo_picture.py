"""The demo's picture: the image under its grid, and the nuclei that the ranks found in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mural.geometry import Cuts

Colour = tuple[int, int, int]

PANEL, MARGIN = 720, 28
INK, QUIET, PAPER = (28, 30, 38), (96, 100, 112), (255, 255, 255)
LINE, STRIP, REACH = (8, 48, 107), (0, 90, 200), (90, 190, 235)
# What a pixel is, by (true nucleus, predicted nucleus); colours that the colour-blind tell apart.
FOUND, MISSED, INVENTED = (0, 158, 115), (240, 195, 0), (213, 70, 0)


def draw(
    image: NDArray[np.uint8],
    mask: NDArray[np.bool_],
    prediction: NDArray[np.bool_],
    *,
    grid: tuple[int, int],
    depth: int,
    steps: int,
    facts: str,
) -> Image.Image:
    """Both panels with their titles, legends and the outcome below; `depth` is that of the U-Net."""
    top, below = 64, 118
    page = Image.new("RGB", (2 * PANEL + 3 * MARGIN, top + PANEL + below), PAPER)
    pen = ImageDraw.Draw(page)
    left, right = MARGIN, 2 * MARGIN + PANEL
    page.paste(cut_panel(image, grid, depth), (left, top))
    page.paste(found_panel(image, mask, prediction), (right, top))
    title = ImageFont.load_default(24)
    # The font that pillow brings has no «×».
    extent = f"{image.shape[0]} x {image.shape[1]}"
    pen.text((left, top - 14), f"One image of {extent} pixels on {prod(grid)} ranks", INK, title, "ls")
    pen.text((right, top - 14), f"Nuclei that the ranks found after {steps} step{'s' * (steps > 1)}", INK, title, "ls")

    row = top + PANEL + 26
    strips = f"strips sent to neighbours by one 3x3 convolution: 1 to {2**depth} px, by level"
    reach = f"reach of all convolutions beyond a cut: {reach_of(depth)} px"
    dice = 2 * (mask & prediction).sum() / max(1, mask.sum() + prediction.sum())
    legend(pen, (left, row), [(LINE, "cut"), (STRIP, strips)])
    legend(pen, (left, row + 28), [(REACH, reach)])
    legend(pen, (right, row), [(FOUND, "found"), (MISSED, "missed"), (INVENTED, "found where there is none")])
    pen.text((right, row + 28), f"overlap with the true mask (Dice): {dice:.2f}", INK, ImageFont.load_default(17), "ls")
    pen.text((left, row + 72), facts, QUIET, ImageFont.load_default(18), "ls")
    return page


def reach_of(depth: int) -> int:
    """Pixels to each side that an output of the U-Net depends on, through its 3×3 convolutions.

    Each of the two convolutions of a block reaches one position, which is 2**level pixels; each level but the
    lowest has two blocks, one on the way down and one on the way up.

    >>> reach_of(3)
    44
    """
    return 2 * 2**depth + sum(2 * 2 * 2**level for level in range(depth))


def cut_panel(image: NDArray[np.uint8], grid: tuple[int, int], depth: int) -> Image.Image:
    """The image with the cuts, the strips along them, and the number of each rank."""
    pixels = image.astype(np.float64)
    bounds = [Cuts.even(extent, parts).bounds for extent, parts in zip(image.shape, grid, strict=False)]
    rows, columns = (distance(cuts[-1], cuts[1:-1]) for cuts in bounds)
    away = np.minimum(rows[:, None], columns[None, :])
    tint(pixels, away < reach_of(depth), REACH, 0.34)
    for level in range(depth, -1, -1):
        tint(pixels, away < 2**level, STRIP, 0.30)
    panel = enlarged(pixels)
    pen, scale = ImageDraw.Draw(panel), PANEL / len(image)
    for cut in bounds[0][1:-1]:
        pen.line([(0, cut * scale), (PANEL, cut * scale)], LINE, 2)
    for cut in bounds[1][1:-1]:
        pen.line([(cut * scale, 0), (cut * scale, PANEL)], LINE, 2)
    font = ImageFont.load_default(20)
    middles = [[(start + stop) / 2 * scale for start, stop in pairwise(cuts)] for cuts in bounds]
    for rank, (y, x) in enumerate(product(*middles)):
        left, top, right, bottom = pen.textbbox((x, y), f"rank {rank}", font, "mm")
        pen.rounded_rectangle((left - 8, top - 7, right + 8, bottom + 7), 6, PAPER, LINE)
        pen.text((x, y), f"rank {rank}", INK, font, "mm")
    return panel


def found_panel(image: NDArray[np.uint8], mask: NDArray[np.bool_], prediction: NDArray[np.bool_]) -> Image.Image:
    """The image in pale grey, with what was found, missed and invented."""
    return enlarged(found_pixels(image, mask, prediction))


def found_pixels(
    image: NDArray[np.uint8], mask: NDArray[np.bool_], prediction: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The pixels of an image in pale grey, with what was found, missed and invented."""
    pixels = pale(image)
    tint(pixels, mask & prediction, FOUND, 0.85)
    tint(pixels, mask & ~prediction, MISSED, 0.95)
    tint(pixels, prediction & ~mask, INVENTED, 0.95)
    return pixels


def pale(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The pixels of an image in pale grey."""
    grey = image.astype(np.float64).mean(axis=2, keepdims=True)
    return np.repeat(150 + 0.41 * grey, 3, axis=2)


def distance(extent: int, cuts: Sequence[int]) -> NDArray[np.float64]:
    """From each position's middle to the nearest cut; infinite if there is none.

    >>> distance(4, (2,))
    array([1.5, 0.5, 0.5, 1.5])
    """
    middles = np.arange(extent) + 0.5
    return np.min([np.full(extent, np.inf), *(np.abs(middles - cut) for cut in cuts)], axis=0)


def tint(pixels: NDArray[np.float64], where: NDArray[np.bool_], colour: Colour, strength: float) -> None:
    """Mix a colour into some of the pixels, in place."""
    pixels[where] = (1 - strength) * pixels[where] + strength * np.array(colour)


def enlarged(pixels: NDArray[np.float64]) -> Image.Image:
    """The pixels as a panel."""
    return as_image(pixels).resize((PANEL, PANEL), Image.Resampling.LANCZOS)


def as_image(pixels: NDArray[np.float64]) -> Image.Image:
    """The pixels, from 0 to 255, as an image."""
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def legend(pen: ImageDraw.ImageDraw, at: tuple[int, int], entries: Sequence[tuple[Colour, str]]) -> None:
    """Patches of colour, each with its meaning, in one row."""
    font, (x, y) = ImageFont.load_default(17), at
    for colour, text in entries:
        pen.rectangle((x, y - 14, x + 16, y + 2), colour)
        pen.text((x + 24, y), text, INK, font, "ls")
        x += round(24 + pen.textlength(text, font) + 26)
