"""Real images that scikit-image ships, with masks that a simple rule draws: for examples, tests and the demo.

The masks are not ground truth. They are what the rule says, which is enough to see a model learn something.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from mural.data.formats.dtypes import Array
from mural.data.image_sample import Sample
from mural.data.sets.memory_sources import ArraySource
from mural.errors import DataError, package


def real(name: str) -> Sample:
    """A bundled image with its mask: "retina" (3, 1411, 1411) or "immunohistochemistry" (3, 512, 512).

    The classes are background and vessels; or background, hematoxylin (blue nuclei) and DAB (brown stain).
    """
    if name not in RULES:
        raise DataError(f"real: there is no image {name!r}: choose one of {', '.join(map(repr, RULES))}")
    image, mask = bundled(name)
    return Sample(name, ArraySource(image, name), ArraySource(mask, f"mask of {name}"))


@lru_cache(maxsize=2)
def bundled(name: str) -> tuple[Array, Array]:
    """Image (3, H, W) and mask (H, W) of a name."""
    data: Any = package("skimage.data", "samples")
    image: Array = np.asarray(getattr(data, name)())
    return np.ascontiguousarray(image.transpose(2, 0, 1)), RULES[name](image)


def vessels(image: Array) -> Array:
    """1 where a dark ridge of 1 to 5 pixels runs through the green channel, inside the disc that the camera sees.

    Ridges are found by Sato's filter; those in the strongest 12% of the disc count, but for 24 pixels along its rim.
    """
    filters: Any = package("skimage.filters", "samples")
    morphology: Any = package("skimage.morphology", "samples")
    green = image[..., 1].astype(np.float32) / 255
    padded = np.pad(image.max(-1) > 25, 24)
    seen = morphology.isotropic_erosion(padded, 24)[24:-24, 24:-24]
    ridges = filters.sato(green, sigmas=(1, 3, 5), black_ridges=True)
    return (seen & (ridges > np.quantile(ridges[seen], 0.88))).astype(np.uint8)


def stains(image: Array) -> Array:
    """1 where there is more hematoxylin, 2 where there is more DAB than Otsu's threshold of that dye; DAB goes first.

    The dyes are separated as Ruifrok and Johnston do, and smoothed over about a pixel.
    """
    color: Any = package("skimage.color", "samples")
    filters: Any = package("skimage.filters", "samples")
    dyes = filters.gaussian(color.rgb2hed(image), sigma=1, channel_axis=-1)
    hematoxylin, dab = (dyes[..., k] > filters.threshold_otsu(dyes[..., k]) for k in (0, 2))
    return np.where(dab, 2, hematoxylin).astype(np.uint8)


RULES: dict[str, Callable[[Array], Array]] = {"retina": vessels, "immunohistochemistry": stains}
