r"""Generated tissue with three questions about its nuclei: one is answered nearby, two far away.

An image holds round lobules, each inside a thin capsule, each full of nuclei. One short stretch of a capsule, its
hilum, is stained red or blue; the rest is grey. A nucleus is dark or pale, and a lobule of grade 2 has more dark ones.

        . - ~ ~ - .
     .'  o  o o  o  '.        hilum:  which colour has the hilum of this nucleus's lobule?  (far: across the lobule)
    /  o  o  •  o  •  \       grade:  has this nucleus's lobule more dark ones?             (wide: many must be seen)
    \  •  o  o  o  o  █       own:    is this nucleus dark?                                 (near: the nucleus itself)
     '.  o  •  o  o .█
        ' - . . - '

The three are drawn independently, so a window that does not show the answer holds no hint of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

Question = Literal["hilum", "grade", "own"]
QUESTIONS: tuple[Question, ...] = ("hilum", "grade", "own")
CLASSES = 3
"""No nucleus, a nucleus of the first kind (red, grade 1, pale), of the second (blue, grade 2, dark)."""

SPACING = 12
"""Pixels between nuclei: one per cell of this lattice, wholly inside its cell."""
SMALLEST = 56
"""Extent of the smallest cell that a lobule may fill."""
MOST = 3
"""At most this many lobules per side."""
DARK = (0.42, 0.58)
"""The share of dark nuclei in lobules of grade 1 and 2."""
PALE_DARK, SPREAD = (0.65, 0.95), 0.08
"""How much dye pale and dark nuclei take on average, and the deviation among them: the two kinds overlap."""
CAPSULE, HILUM = 1.5, 4.0
"""Half the thickness of a capsule, and of its hilum."""
ANGLE = 0.45
"""Half the angle over which the capsule is stained."""

# Optical density in red, green and blue.
HEMATOXYLIN, EOSIN = (0.65, 0.70, 0.29), (0.08, 0.95, 0.25)
GREY, RED, BLUE = (0.55, 0.60, 0.50), (0.15, 0.95, 0.70), (0.95, 0.45, 0.15)


@dataclass(frozen=True)
class Scene:
    """Images and what is true of them: N images of S × S pixels; G × G cells of nuclei, some of them empty.

    `answers` are the labels of each question; `lobule` is the number of the lobule whose nucleus covers a pixel, or
    −1, and `hilum` that of the lobule whose hilum does. Of the nucleus in each cell, `owner` is its lobule's
    number, or −1 for an empty cell, `centre` the pixel of its middle, and `density` how dark it is.
    """

    image: Tensor  # (N, S, S, 3) uint8
    answers: Tensor  # (N, questions, S, S) uint8
    lobule: Tensor  # (N, S, S) int8
    hilum: Tensor  # (N, S, S) int8
    owner: Tensor  # (N, G, G) int8
    centre: Tensor  # (N, G, G, 2) long
    density: Tensor  # (N, G, G) float

    def answer(self, question: Question) -> Tensor:
        """The labels (N, S, S) of one question."""
        return self.answers[:, QUESTIONS.index(question)]


@dataclass(frozen=True)
class Lobules:
    """Where the lobules of each image are: one in each cell of a lattice of `count` × `count`, of MOST² at most."""

    size: int
    count: Tensor  # (N,)
    shift: Tensor  # (N, MOST², 2) in cells, from the middle of the cell
    radius: Tensor  # (N, MOST²) in cells
    phase: Tensor  # (N, MOST², 3) of the outline's waves, and of the hilum

    def at(self, down: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each point (N, …): its cell's lobule, how deep it lies inside the capsule, whether towards the hilum."""
        like = (-1, *(1,) * (down.dim() - 1))
        cell = self.size / self.count.view(like)
        row, column = (torch.clamp(p / cell, max=MOST - 1e-4).floor() for p in (down, right))
        number = (row * MOST + column).long()
        flat = number.flatten(1)

        def of(values: Tensor) -> Tensor:
            return values.gather(1, flat).view(down.shape)

        y = down - (row + 0.5 + of(self.shift[..., 0])) * cell
        x = right - (column + 0.5 + of(self.shift[..., 1])) * cell
        angle = torch.atan2(y, x)
        three, five, hilum = (of(self.phase[..., k]) for k in range(3))
        wave = 0.05 * torch.sin(3 * angle + three) + 0.03 * torch.sin(5 * angle + five)
        towards = torch.cos(angle - hilum) > math.cos(ANGLE)
        return number, of(self.radius) * cell * (1 + wave) - torch.hypot(y, x), towards


@dataclass(frozen=True)
class Nuclei:
    """The nucleus of each cell (N, G, G): middle, radius, lobule (−1: no nucleus here), whether dark, and how dark."""

    down: Tensor
    right: Tensor
    radius: Tensor
    owner: Tensor
    dark: Tensor
    density: Tensor


def lattices(size: int) -> tuple[int, ...]:
    """The numbers of lobules per side that images of this size have.

    >>> lattices(512), lattices(128)
    ((1, 2, 3), (1, 2))
    """
    return tuple(n for n in range(1, MOST + 1) if size / n >= SMALLEST)


def draw_lobules(count: int, size: int, draw: torch.Generator) -> Lobules:
    """Lobules of random place, size and outline."""
    choices = torch.tensor(lattices(size))
    per_side = choices[torch.randint(len(choices), (count,), generator=draw)]
    many = (count, MOST**2)
    radius = 0.34 + 0.09 * torch.rand(many, generator=draw)
    # What is left of the cell, less the outline's waves (8%) and a rim, is room to shift.
    room = (0.49 - 1.08 * radius).clamp_min(0)[..., None]
    shift = room * (2 * torch.rand(*many, 2, generator=draw) - 1)
    return Lobules(size, per_side, shift, radius, 2 * math.pi * torch.rand(*many, 3, generator=draw))


def scenes(count: int, size: int, seed: int, device: torch.device, chunk: int = 32) -> Scene:
    """That many images with their answers; a seed always gives the same on the same kind of device.

    >>> scene = scenes(2, 64, seed=0, device=torch.device("cpu"))
    >>> scene.image.shape, scene.answer("own").unique().tolist()
    (torch.Size([2, 64, 64, 3]), [0, 1, 2])
    """
    parts = list(_parts(count, size, seed, device, chunk))
    return Scene(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Scene)))


def _parts(count: int, size: int, seed: int, device: torch.device, chunk: int) -> Iterator[Scene]:
    for number, first in enumerate(range(0, count, chunk)):
        # Where things are is drawn on the CPU: the same on every device. Noise is drawn where the pixels are.
        draw = torch.Generator().manual_seed(1_000_003 * seed + number)
        yield render(min(chunk, count - first), size, draw, device)


def render(count: int, size: int, draw: torch.Generator, device: torch.device) -> Scene:
    """Images drawn from a generator."""
    cells = -(-size // SPACING)
    lobules = draw_lobules(count, size, draw)
    many = (count, MOST**2)
    blue, grade = (torch.rand(many, generator=draw) < 0.5 for _ in range(2))
    grid = (count, cells, cells)
    radius = 3.2 + 1.2 * torch.rand(grid, generator=draw)
    free = SPACING / 2 - radius
    middle = (torch.arange(cells) + 0.5) * SPACING
    down, right = (
        place + free * (2 * torch.rand(grid, generator=draw) - 1) for place in (middle[:, None], middle[None, :])
    )
    owner, depth, _ = lobules.at(down, right)
    there = (depth > radius + HILUM + 1) & (torch.rand(grid, generator=draw) < 0.85)
    share = torch.tensor(DARK)[grade.long().gather(1, owner.flatten(1)).view(grid)]
    dark = (torch.rand(grid, generator=draw) < share) & there
    density = torch.tensor(PALE_DARK)[dark.long()] + SPREAD * torch.randn(grid, generator=draw)
    noise = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=draw)))
    lobules = Lobules(size, *(t.to(device) for t in (lobules.count, lobules.shift, lobules.radius, lobules.phase)))
    nuclei = Nuclei(*(t.to(device) for t in (down, right, radius, torch.where(there, owner, -1), dark, density)))
    return paint(lobules, nuclei, blue.to(device), grade.to(device), noise)


def paint(lobules: Lobules, nuclei: Nuclei, blue: Tensor, grade: Tensor, noise: torch.Generator) -> Scene:
    """The pixels of images whose lobules and nuclei are known."""
    count, size, device = len(blue), lobules.size, blue.device
    at = torch.arange(size, device=device)
    y, x = (v.expand(count, size, size) for v in (at[None, :, None] + 0.5, at[None, None, :] + 0.5))

    def spread(values: Tensor) -> Tensor:
        return values[:, at // SPACING][:, :, at // SPACING]

    owner, depth, towards = lobules.at(y, x)
    covered = torch.hypot(y - spread(nuclei.down), x - spread(nuclei.right)) < spread(nuclei.radius)
    lobule = torch.where(covered, spread(nuclei.owner), -1)
    covered, capsule = lobule >= 0, depth.abs() < torch.where(towards, HILUM, CAPSULE)
    hilum = torch.where(capsule & towards, owner, -1)
    is_blue, is_grade_2 = (v.gather(1, owner.flatten(1)).view(owner.shape) for v in (blue, grade))
    kinds = (is_blue, is_grade_2, spread(nuclei.dark))
    answers = torch.stack([covered * (1 + kind.long()) for kind in kinds], 1).to(torch.uint8)

    eosin, hematoxylin, grey, red, azure = (
        torch.tensor(dye, device=device) for dye in (EOSIN, HEMATOXYLIN, GREY, RED, BLUE)
    )
    ink = torch.where(depth > 0, 0.25, 0.45)[..., None] * eosin
    ink = ink + (covered * spread(nuclei.density))[..., None] * hematoxylin
    stain = torch.where(towards[..., None], torch.where(is_blue[..., None], azure, red), grey)
    ink = ink + capsule[..., None] * stain
    light = torch.exp(-ink) + 0.06 * torch.randn(ink.shape, generator=noise, device=device)
    image = (255 * light.clamp(0, 1)).to(torch.uint8)
    centre = torch.stack([nuclei.down, nuclei.right], -1).long().clamp_max(size - 1)
    lobule, hilum, owner = (v.to(torch.int8) for v in (lobule, hilum, nuclei.owner))
    return Scene(image, answers, lobule, hilum, owner, centre, nuclei.density)
