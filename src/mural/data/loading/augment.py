"""Augmentations that are the same whatever the plan: drawn from (seed, epoch, sample), done on a rank's own piece.

Flips and turns read the box that a rank's own comes from (see `turned_view.py`). Intensities change each value by
itself, and noise comes from a lattice of blocks of the augmented image (decision 0006), so a piece gets what the whole
image would get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import exp

import torch
from torch import Tensor

from mural.data.loading.seeded_draws import generator, seed_of, uniform, whole_number
from mural.data.loading.turned_view import QuarterTurns
from mural.errors import DataError
from mural.geometry import Box, overlap, slices
from mural.shard.ops.random.lattice import BLOCK, blocks, lattice

SERIAL = 2**14
"""Fewer values than torch divides among threads, and a multiple of the widest vector register."""


@dataclass(frozen=True)
class Augment:
    """What may happen to a training sample with values in [0, 1]; a number is the largest strength, 0 is none.

    >>> Augment(noise=0.02).draw(seed=0, epoch=0, index=3, channels=3, extents=(64, 64)).gamma
    1.0
    """

    flips: bool = True
    """Flips along each of `dims`, each with probability one half."""
    rotations: bool = True
    """Rotations by multiples of 90°; of images whose sides differ, by 180° alone."""
    brightness: float = 0.0
    """The largest value that is added or subtracted."""
    contrast: float = 0.0
    """Values are scaled around 0.5 by a factor between 1 - c and 1 + c."""
    gamma: float = 0.0
    """Values are raised to a power between exp(-g) and exp(g)."""
    channel_scale: float = 0.0
    """As contrast, for each channel by itself."""
    channel_shift: float = 0.0
    """As brightness, for each channel by itself."""
    noise: float = 0.0
    """The largest deviation of normal noise that is added."""
    dims: tuple[int, ...] | None = None
    """The spatial dims that are flipped and rotated, counted from 0; else the last two."""
    swap: bool = False
    """Whether rotations may swap sides that differ; then take batch = 1."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not 0 <= value < float("inf"):
                raise DataError(f"augment: {field.name}={value} must be a number of at least 0")
        if self.dims is not None and (len(set(self.dims)) != len(self.dims) or min(self.dims, default=0) < 0):
            raise DataError(f"augment: dims={self.dims} must name different spatial dims, counted from 0")

    def draw(self, seed: int, epoch: int, index: int, channels: int, extents: Sequence[int]) -> Drawn:
        """What happens to one sample in one epoch; every kind of change has a generator of its own."""
        limits = {"brightness": self.brightness, "contrast": self.contrast, "gamma": self.gamma}
        b, c, g = (uniform(-limit, limit, 1, seed, epoch, index, name)[0] for name, limit in limits.items())
        scales = uniform(1 - self.channel_scale, 1 + self.channel_scale, channels, seed, epoch, index, "scale")
        shifts = uniform(-self.channel_shift, self.channel_shift, channels, seed, epoch, index, "shift")
        contrast = 1 + c
        return Drawn(
            self.draw_turn(seed, epoch, index, extents),
            exp(g),
            tuple(contrast * scale for scale in scales),
            tuple((0.5 - 0.5 * contrast + b) * scale + shift for scale, shift in zip(scales, shifts, strict=True)),
            uniform(0, self.noise, 1, seed, epoch, index, "noise")[0],
            seed_of(seed, epoch, index, "noise values"),
        )

    def draw_turn(self, seed: int, epoch: int, index: int, extents: Sequence[int]) -> QuarterTurns:
        """The flips, then the rotation, of one sample in one epoch."""
        ndim = len(extents)
        dims = tuple(range(max(0, ndim - 2), ndim)) if self.dims is None else self.dims
        if dims and max(dims) >= ndim:
            raise DataError(f"augment: dims={dims} name a dim that an image of spatial extents {tuple(extents)} lacks")
        turn = QuarterTurns.none(ndim)
        if self.flips:
            turn = QuarterTurns.flip(ndim, [d for d in dims if whole_number(2, seed, epoch, index, "flip", d)])
        if self.rotations and len(dims) > 1:
            plane = (dims[-2], dims[-1])
            if len(dims) > 2:  # any plane of the chosen dims
                pairs = [(a, b) for i, a in enumerate(dims) for b in dims[i + 1 :]]
                plane = pairs[whole_number(len(pairs), seed, epoch, index, "plane")]
            quarters = whole_number(4, seed, epoch, index, "rotation")
            if extents[plane[0]] != extents[plane[1]] and not self.swap:
                quarters = quarters // 2 * 2
            turn = turn.then(QuarterTurns.rotation(ndim, quarters, plane))
        return turn


@dataclass(frozen=True)
class Drawn:
    """What happens to one sample: its turn; then value → sign · |value|^gamma · gain + offset + noise."""

    turn: QuarterTurns
    gamma: float
    gain: tuple[float, ...]
    offset: tuple[float, ...]
    noise: float
    key: int

    def recolour(self, piece: Tensor, box: Box, shape: Sequence[int]) -> None:
        """Change the values of a piece (C, …) that is a box of the augmented image (C, …), in place."""
        if self.gamma != 1.0:
            raise_to(piece, self.gamma)
        each = (len(self.gain), *(1,) * (piece.ndim - 1))
        if any(gain != 1.0 for gain in self.gain):
            piece.mul_(torch.tensor(self.gain, dtype=piece.dtype).view(each))
        if any(self.offset):
            piece.add_(torch.tensor(self.offset, dtype=piece.dtype).view(each))
        if self.noise:
            add_noise(piece, box, shape, self.noise, self.key)


def raise_to(piece: Tensor, power: float) -> None:
    """Raise each value to a power, keeping its sign, in place.

    torch computes most values in vector registers and the last few one by one, and the two may differ in the last bit;
    where those few are depends on the piece. Runs that fill whole registers give each value the same bits everywhere.
    """
    values, run = piece.contiguous(), piece.new_zeros(SERIAL)
    for part in values.view(-1).split(SERIAL):
        run[: len(part)] = part
        signs = run.sign()
        part.copy_(run.abs_().pow_(power).mul_(signs)[: len(part)])
    if values is not piece:
        piece.copy_(values)


def add_noise(piece: Tensor, box: Box, shape: Sequence[int], deviation: float, key: int) -> None:
    """Add the normal noise that belongs to a box of an image of that shape, in place."""
    for at, place in blocks(box, shape, lattice(shape, BLOCK["cpu"])):
        inside = overlap(box, place)
        values = torch.empty([i.size for i in place], dtype=piece.dtype)
        values.normal_(0.0, deviation, generator=generator(key, *at))
        part = values[slices(inside, place)]
        piece[slices(inside, box)].add_(part)
