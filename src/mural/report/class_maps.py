"""Pictures of predictions: an image, its mask, what a model says of it and where they differ, in colours of classes."""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mural.report import plots
from mural.report.demo_picture import FOUND, INVENTED, MISSED, as_image, found_pixels, pale, tint

FIRST, UNLABELLED, DIFFERENT = "#c9c7c1", "#ffffff", "#000000"
"""The first class, positions of a mask that are of no class, and those where mask and prediction differ."""
TURN = 0.618
"""Of the circle of hues, from one colour to the next, once the palette is used up."""


@dataclass(frozen=True)
class Panel:
    """A picture with its title."""

    title: str
    image: Image.Image
    photo: bool = False


@dataclass(frozen=True)
class PictureRow:
    """The panels of one image."""

    name: str
    caption: str
    panels: Sequence[Panel]


Legend = Sequence[tuple[str, str]]
"""Colours with what they mean."""


def class_colours(count: int) -> list[str]:
    """A colour for each class: grey for the first, which is most often the background.

    >>> class_colours(3)
    ['#c9c7c1', '#2f6db5', '#b4610d']
    """
    found = [FIRST, *plots.PALETTE]
    while len(found) < count:
        turn = TURN * len(found) % 1
        red, green, blue = colorsys.hls_to_rgb(turn, 0.45, 0.6)
        found.append(f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}")
    return found[:count]


def class_panels(
    image: NDArray[np.uint8], mask: NDArray[np.int64] | None, predicted: NDArray[np.int64], classes: int
) -> list[Panel]:
    """The panels of an image with classes; positions of the mask that are no class are in no difference."""
    found = [Panel("image", as_image(image.astype(np.float64)), photo=True)]
    if mask is None:
        return [*found, Panel("prediction", painted(predicted, classes))]
    known = (mask >= 0) & (mask < classes)
    maps = [Panel("mask", painted(mask, classes)), Panel("prediction", painted(predicted, classes))]
    if classes == 2:
        pixels = found_pixels(image, known & (mask == 1), known & (predicted == 1))
    else:
        pixels = pale(image)
        tint(pixels, known & (mask != predicted), rgb(DIFFERENT), 0.95)
    return [*found, *maps, Panel("difference", as_image(pixels))]


def value_panels(
    image: NDArray[np.uint8], mask: NDArray[np.float64] | None, predicted: NDArray[np.float64]
) -> list[Panel]:
    """The panels of an image with values, from black, the lowest, to white, the highest of both."""
    both = predicted if mask is None else np.concatenate([mask.ravel(), predicted.ravel()])
    seen = both[np.isfinite(both)]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 1.0)
    found = [Panel("image", as_image(image.astype(np.float64)), photo=True)]
    maps = {"mask": mask, "prediction": predicted} if mask is not None else {"prediction": predicted}
    found += [Panel(name, greyed(values, low, high)) for name, values in maps.items()]
    if mask is not None:
        found.append(Panel("difference", greyed(np.abs(mask - predicted), 0.0, high - low)))
    return found


def painted(labels: NDArray[np.int64], classes: int) -> Image.Image:
    """A map of classes in their colours."""
    table = np.array([rgb(colour) for colour in (*class_colours(classes), UNLABELLED)], np.float64)
    known = (labels >= 0) & (labels < classes)
    return as_image(table[np.where(known, labels, classes)])


def greyed(values: NDArray[np.float64], low: float, high: float) -> Image.Image:
    """A map of values in grey."""
    grey = (np.nan_to_num(values) - low) / ((high - low) or 1.0) * 255
    return as_image(np.repeat(grey[..., None], 3, axis=2))


def rgb(colour: str) -> tuple[int, int, int]:
    """The parts of a colour.

    >>> rgb("#c9c7c1")
    (201, 199, 193)
    """
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def class_legend(names: Sequence[str], unlabelled: bool, differences: bool) -> Legend:
    """What the colours of pictures with classes mean."""
    found = list(zip(class_colours(len(names)), names, strict=True))
    found += [(UNLABELLED, "not labelled")] if unlabelled else []
    if differences and len(names) == 2:
        words = (f"{names[1]} found", f"{names[1]} missed", f"{names[1]} where there is none")
        found += list(zip(map(hexed, (FOUND, MISSED, INVENTED)), words, strict=True))
    elif differences:
        found.append((DIFFERENT, "prediction and mask differ"))
    return found


def hexed(colour: tuple[int, int, int]) -> str:
    """A colour as CSS writes it.

    >>> hexed((0, 158, 115))
    '#009e73'
    """
    return "#" + "".join(f"{part:02x}" for part in colour)


def data_uri(panel: Panel) -> str:
    """A picture as a part of a page: photographs as JPEG, maps as PNG."""
    file, kind = io.BytesIO(), "jpeg" if panel.photo else "png"
    panel.image.save(file, kind.upper(), **({"quality": 88} if panel.photo else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
