"""Reading: the piece of a sample that this rank holds, from its files to the numbers that the model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mural.data.image_sample import Sample, Samples, is_path, label_of, opened, sample_at
from mural.data.loading.augment import Augment, Drawn
from mural.data.loading.open_files import OpenFiles
from mural.data.loading.pixels import Pixels
from mural.data.loading.seeded_draws import whole_number
from mural.data.loading.turned_view import QuarterTurns, View
from mural.data.source import Source, level_of
from mural.engine.inputs import Needs
from mural.errors import UnfitData
from mural.geometry import Box, Cuts, Interval, overlap, slices, volume, whole
from mural.geometry.tile_grid import split
from mural.ranks import SPATIAL, Mesh
from mural.shard.layout import Layout
from mural.shard.place import cuts_of, layout_of, spatial_dims

MOST_AT_ONCE = 2**20
"""Positions that one task of a worker reads at most: little memory besides the batch, and soon done when the
loader is closed."""
LEAST_AT_ONCE = 2**18
"""A box with fewer positions for each worker is not divided."""

NOTHING, MASK, CLASS, VALUE = range(4)
"""What a target is."""


@dataclass(frozen=True)
class SampleForm:
    """What must be equal for samples to be in one batch: channels, extents, and what the target is."""

    channels: int
    extents: tuple[int, ...]
    target: int = NOTHING
    width: int = 0
    """Channels of a mask; numbers of a label, 0 for a single one."""
    stored: tuple[int, ...] = field(default=(0, 0), compare=False)
    """The extents in the file, before crop and padding: these may differ in a batch."""

    @property
    def code(self) -> list[int]:
        """The form as ten numbers."""
        extents, stored = (*self.extents, 0, 0)[:3], (*self.stored, 0, 0)[:3]
        return [self.channels, len(self.extents), *extents, self.target, self.width, *stored]

    @classmethod
    def decoded(cls, code: Sequence[int]) -> SampleForm:
        """The form that ten numbers stand for."""
        return cls(code[0], tuple(code[2 : 2 + code[1]]), code[5], code[6], tuple(code[7 : 7 + code[1]]))

    def __str__(self) -> str:
        targets = ("no target", f"a mask of {self.width} channels", "a class", "a value")
        return f"{(self.channels, *self.extents)} with {targets[self.target]}"


def placed(mesh: Mesh, form: SampleForm, counts: Sequence[int], align: int) -> Layout:
    """The layout of images of a form, of which each coordinate of the data axis holds a given number."""
    shape = (sum(counts), form.channels, *form.extents)
    axes = dict(zip(spatial_dims(len(shape), mesh, None), SPATIAL, strict=False)) | {0: "data"}
    return layout_of(mesh, shape, axes, cuts_of(shape, mesh, axes, {0: Cuts.sized(counts)}, align))


@dataclass(frozen=True)
class SamplePiece:
    """One sample as this rank reads it: its open sources, how it is seen, and which box of that view is this rank's."""

    name: str
    form: SampleForm
    image: Source
    level: int
    mask: Source | None
    mask_level: int
    label: Tensor | None
    view: View
    drawn: Drawn | None
    box: Box


@dataclass(frozen=True)
class Reader:
    """Everything that determines what a sample's piece holds on this rank."""

    samples: Samples
    needs: Needs
    files: OpenFiles
    pixels: Pixels
    augment: Augment | None
    seed: int
    align: int
    level: int
    crop: tuple[int, ...] | None
    crop_at_random: bool
    pad_to: int
    pad_target: float | None

    def open(self, index: int, epoch: int) -> SamplePiece:
        """A sample's sources, opened, and this rank's part in them."""
        sample = sample_at(self.samples, index)
        image, mask, mask_level, label = sources_of(sample, self.files.take, self.level, self.pixels)
        extents = level_of(image, self.level).shape[1:]
        channels = image.shape[0]
        window = self.window(extents, index, epoch, image.name)
        sides = [i.size for i in window]
        drawn = self.augment.draw(self.seed, epoch, index, channels, sides) if self.augment is not None else None
        view = View(extents, window, drawn.turn if drawn is not None else QuarterTurns.none(len(extents)))
        kind = MASK if mask else NOTHING if label is None else VALUE if label.is_floating_point() else CLASS
        width = mask.shape[0] if mask is not None else label.numel() if label is not None and label.ndim else 0
        form = SampleForm(channels, view.shape, kind, width, extents)
        if mask is not None and self.pad_target is None:
            check_fits(mask, extents, [i.size for i in window], self.pad_to)
        mesh = self.needs.mesh
        box = placed(mesh, form, (0,) * mesh.size("data"), self.align).box[2:]
        return SamplePiece(sample.name, form, image, self.level, mask, mask_level, label, view, drawn, box)

    def window(self, extents: tuple[int, ...], index: int, epoch: int, name: str) -> Box:
        """The part of an image that the model sees, which sticks out where the image is padded."""
        crop = extents if self.crop is None else self.crop
        if len(crop) != len(extents):
            raise UnfitData(f"{name}: crop={crop} was given for an image of spatial extents {extents}", name)
        found: list[Interval] = []
        for d, (extent, side) in enumerate(zip(extents, crop, strict=True)):
            slack = extent - side
            start = slack // 2
            if self.crop_at_random and slack:
                start = min(0, slack) + whole_number(abs(slack) + 1, self.seed, epoch, index, "crop", d)
            found.append(Interval(start, start + -(-side // self.pad_to) * self.pad_to))
        return tuple(found)

    def tasks(
        self, piece: SamplePiece, image: Tensor | None, target: Tensor | None, parts: int
    ) -> list[Callable[[], None]]:
        """What to call to fill a sample's places in a batch: parts of its box, which several threads may read."""
        behind = piece.view.behind(piece.box)
        parts = min(parts, -(-volume(behind) // LEAST_AT_ONCE))
        tasks: list[Callable[[], None]] = []
        if image is not None:
            for part in divided(behind, piece.image, parts):
                tasks.append(partial(self.fill_image, piece, part, image))
        if piece.mask is not None and target is not None:
            for part in divided(behind, piece.mask, parts):
                tasks.append(partial(self.fill_mask, piece, part, target))
        return tasks

    def fill_image(self, piece: SamplePiece, part: Box, out: Tensor) -> None:
        """Read a box of an image's file into its place in a batch; all work is done there, without further copies."""
        at, work = piece.view.before(part), self.pixels.work
        place = out[(slice(None), *slices(at, piece.box))]
        values = place if out.dtype == work else torch.empty(place.shape, dtype=work)
        raw, inside = read_turned(piece.image, piece.level, piece.view, part)
        if inside != at:
            values.zero_()
        if raw is not None:
            inner = values[(slice(None), *slices(inside, at))]
            inner.copy_(raw)
            self.pixels.rescale(inner, raw.dtype)
        if piece.drawn is not None:
            channels = Interval(0, piece.form.channels)
            piece.drawn.recolour(values, (channels, *at), (piece.form.channels, *piece.form.extents))
        self.pixels.normalise(values)
        if values is not place:
            place.copy_(values)

    def fill_mask(self, piece: SamplePiece, part: Box, out: Tensor) -> None:
        """Read a box of a mask's file into its place in a batch."""
        mask = piece.mask
        if mask is None:
            return
        at = piece.view.before(part)
        place = out[(..., *slices(at, piece.box))]
        found, inside = read_turned(
            mask,
            piece.mask_level,
            piece.view,
            part,
            lambda raw, box: self.pixels.target(raw, mask, [i.start for i in box]),
        )
        if inside != at:
            place.fill_(self.pad_target or 0)
        if found is not None:
            if self.pad_target != self.pad_target:
                check_values(found, mask)
            place[(..., *slices(inside, at))].copy_(found if self.pixels.mask == "channels" else found[0])


def check_values(values: Tensor, mask: Source) -> None:
    """Raise where a mask holds NaN itself, which marks padding."""
    if bool((values != values).any()):
        raise UnfitData(
            f"{mask.name}: the mask holds NaN, which no loss compares with: write a value everywhere, or take "
            f"a loss of your own and no data.multiple",
            mask.name,
        )


def check_fits(mask: Source, extents: Sequence[int], shown: Sequence[int], multiple: int) -> None:
    """Raise if a mask has to be padded for a loss that would count the padding."""
    if any(side > extent for extent, side in zip(extents, shown, strict=True)):
        raise UnfitData(
            f"{mask.name}: the mask of {tuple(extents)} is padded to {tuple(shown)} (data.multiple = {multiple}), and "
            f"the loss would count the padding: take one of mural's list (loss.name), or give yours an ignore_index "
            f"that is no class (loss.arguments), or take images whose extents are multiples of {multiple}",
            mask.name,
        )


def sources_of(
    sample: Sample, take: Callable[[str], Source], level: int, pixels: Pixels
) -> tuple[Source, Source | None, int, Tensor | None]:
    """Image, mask, the mask's level and label of a sample, opened and compared with each other."""
    image = opened(sample.image, sample.name, take)
    pixels.check_channels(image)
    extents = level_of(image, level).shape[1:]
    label = label_of(sample.target)
    if sample.target is None or label is not None:
        return image, None, 0, None if label is None else pixels.label(label, sample.name)
    named = str(sample.target) if is_path(sample.target) else f"the mask of {sample.name}"
    mask = opened(sample.target, named, take, len(extents))
    if mask.shape[0] != 1 and pixels.mask != "channels":
        raise UnfitData(
            f"{mask.name}: the mask has {mask.shape[0]} channels, but {pixels.mask} need one: "
            f"save it with one channel, or take mask='channels'",
            mask.name,
        )
    levels = [number for number, found in enumerate(mask.levels) if found.shape[1:] == extents]
    if not levels:
        raise UnfitData(
            f"{mask.name}: the mask has the spatial extents {mask.shape[1:]}, but its image {image.name} has {extents}"
            f"{f' at level {level}' if level else ''}: save the mask at the size of its image",
            mask.name,
        )
    return image, mask, levels[0], None


def divided(behind: Box, source: Source, parts: int) -> tuple[Box, ...]:
    """The parts of a file's box that tasks read."""
    return split(behind, source.chunks[1:], parts, MOST_AT_ONCE) if volume(behind) else ()


def read_turned(
    source: Source, level: int, view: View, part: Box, convert: Callable[[Tensor, Box], Tensor] = lambda raw, _: raw
) -> tuple[Tensor | None, Box]:
    """What a file holds of a box, turned as the view is, and its place in the view: the box may stick out."""
    inside = overlap(part, whole(view.extents))
    if not volume(inside):
        return None, ()
    raw = convert(source.read(((0, source.shape[0]), *inside), level), inside)
    return view.turn.apply(raw), view.before(inside)
