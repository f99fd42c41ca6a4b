"""A generated image that looks like stained tissue, with the mask of its nuclei.

Light is absorbed by two dyes (Beer and Lambert): eosin, pink, in the stroma; hematoxylin, purple, in the nuclei.
So the image is made of two fields of dye, and the colours follow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float64]

# Optical density of each dye in red, green and blue: Ruifrok and Johnston, 2001, the eosin a little warmer.
HEMATOXYLIN = np.array([0.65, 0.70, 0.29])
EOSIN = np.array([0.08, 0.95, 0.25])
SPACING = 21
REACH = 13


def tissue(size: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """The image (size, size, 3), and where its nuclei are (size, size); a seed always gives the same.

    >>> image, mask = tissue(64, seed=0)
    >>> image.shape, image.dtype, mask.shape, 0.05 < mask.mean() < 0.4
    ((64, 64, 3), dtype('uint8'), (64, 64), np.True_)
    """
    draw = np.random.default_rng(seed)
    depth = nuclei(size, draw)
    mask = depth > 0
    inside = np.clip(4 * depth, 0, 1)
    gap = np.clip(3 * (smooth(size, 34, draw) - 1.35), 0, 1) * (1 - inside)
    eosin = (0.40 + 0.09 * smooth(size, 40, draw) + 0.10 * fibres(size, draw)) * (1 - 0.92 * gap)
    chromatin = 0.78 + 0.16 * smooth(size, 1.6, draw) + 0.10 * smooth(size, 60, draw)
    haze = 0.06 + 0.03 * smooth(size, 12, draw)
    hematoxylin = np.where(mask, inside * chromatin, 0) + haze * (1 - gap)
    density = eosin[..., None] * EOSIN + np.maximum(hematoxylin, 0)[..., None] * HEMATOXYLIN
    light = 0.97 * np.exp(-density) + 0.012 * draw.standard_normal((size, size, 3))
    return (255 * np.clip(light, 0, 1)).astype(np.uint8), mask


def smooth(size: int, radius: float, draw: np.random.Generator) -> Field:
    """Noise of mean 0 and deviation 1 whose spots have about that radius in pixels."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None, :])
    spectrum = np.fft.rfft2(draw.standard_normal((size, size))) * np.exp(-2 * (np.pi * radius * frequency / 2) ** 2)
    noise = np.fft.irfft2(spectrum, s=(size, size))
    return (noise - noise.mean()) / (noise.std() + 1e-12)


def fibres(size: int, draw: np.random.Generator) -> Field:
    """Wavy strands of stroma, between −1 and 1."""
    rows, columns = np.mgrid[:size, :size]
    bend = 22 * smooth(size, 48, draw) + 2.5 * smooth(size, 7, draw)
    return np.sin(2 * np.pi * (0.8 * rows + 0.5 * columns + bend) / 15) * (0.6 + 0.4 * np.tanh(smooth(size, 30, draw)))


def nuclei(size: int, draw: np.random.Generator) -> Field:
    """How deep each pixel lies in a nucleus: 1 at a centre, 0 on the rim, negative outside.

    Nuclei are ellipses with a slightly lobed rim, on a jittered lattice that leaves out what falls in sparse areas.
    """
    count = size // SPACING + 2
    lattice = np.stack(np.meshgrid(np.arange(count), np.arange(count), indexing="ij"), -1).reshape(-1, 2)
    centre = (lattice + draw.uniform(-0.36, 0.36, lattice.shape)) * SPACING
    crowd = smooth(size, 44, draw)[tuple(np.clip(centre, 0, size - 1).astype(int).T)]
    centre = centre[draw.uniform(size=len(centre)) < 0.62 + 0.26 * crowd]
    n = (len(centre), 1, 1)
    angle, lobe = draw.uniform(0, np.pi, n), draw.uniform(0, 2 * np.pi, n)
    long, ratio = draw.uniform(5.5, 9.5, n), draw.uniform(0.55, 0.95, n)

    offset = np.arange(-REACH, REACH + 1)
    corner = centre.astype(int)
    down = offset[None, :, None] + (corner - centre)[:, 0, None, None]
    right = offset[None, None, :] + (corner - centre)[:, 1, None, None]
    along = (np.cos(angle) * right + np.sin(angle) * down) / long
    across = (np.cos(angle) * down - np.sin(angle) * right) / (long * ratio)
    rim = 1 + 0.07 * np.sin(3 * np.arctan2(across, along) + lobe)
    depth = 1 - np.hypot(along, across) / rim

    canvas = np.full((size + 2 * REACH + 2 * SPACING,) * 2, -1.0)
    at_row = corner[:, 0, None, None] + offset[None, :, None] + REACH
    at_column = corner[:, 1, None, None] + offset[None, None, :] + REACH
    inside = (at_row >= 0) & (at_column >= 0) & (at_row < len(canvas)) & (at_column < len(canvas))
    at_row, at_column = np.broadcast_arrays(at_row, at_column)
    np.maximum.at(canvas, (at_row[inside], at_column[inside]), depth[inside])
    return canvas[REACH : REACH + size, REACH : REACH + size]
