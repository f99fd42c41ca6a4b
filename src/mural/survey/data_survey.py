"""The survey of images and masks: their formats, sizes, types and values, and which of them cannot be used."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from mural.data.image_sample import Sample
from mural.data.loading.pixels import Pixels
from mural.data.loading.preflight import SampleHeader, Unusable, header
from mural.data.open import open as open_source
from mural.errors import DataError
from mural.survey.folder_layout import FolderLayout, Pair, ending
from mural.survey.image_values import ImageValues, values_in_images
from mural.survey.mask_values import MaskValues, values_in
from mural.survey.sampled_boxes import Progress, told

SHOWN = 3


@dataclass(frozen=True)
class DataSurvey:
    """What the images that can be used are like, and why others cannot."""

    training: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    channels: int
    dtype: torch.dtype
    sizes: Counter[tuple[int, ...]]
    """Spatial extents, and how many images have them."""
    values: ImageValues | None
    masks: MaskValues | None
    unusable: dict[Path, str] = field(default_factory=dict[Path, str])
    """Images that are left out, each with the reason."""

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All that can be used."""
        return self.training + self.validation

    @property
    def largest(self) -> tuple[int, ...]:
        """The extents of the image with the most positions."""
        return max(self.sizes, key=prod)

    def endings(self, part: int) -> Counter[str]:
        """The endings of images (0) or masks (1), and how many there are of each."""
        return Counter(ending(file) for pair in self.pairs if isinstance(file := pair[part], Path))


def surveyed(layout: FolderLayout, progress: Progress) -> DataSurvey:
    """The survey of a folder's images: every file is opened, masks are counted, some pixels are looked at."""
    pairs = layout.training + layout.validation
    headers, unusable = headers_of(pairs, progress)
    common = most_common(headers)
    for image, found in headers.items():
        if found.code != common.code:
            unusable[image] = (
                f"{image}: {kind_of(found)}, but most images are {kind_of(common)}: images of one run must be alike"
            )
    alike = [pair for pair in pairs if pair[0] not in unusable]
    values, bad = values_in_images([image for image, _ in alike], progress)
    unusable |= bad
    masks = {mask: image for image, mask in alike if isinstance(mask, Path) and image not in unusable}
    sizes = [prod(headers[image].extents) for image in masks.values()]
    counted, bad = values_in([*masks], sizes, progress) if masks else (None, {})
    unusable |= {masks[mask]: reason for mask, reason in bad.items()}
    usable = {image for image, _ in alike if image not in unusable}
    check_some(usable, unusable)
    check_every_class(layout, pairs, usable)
    kept = [tuple(pair for pair in some if pair[0] in usable) for some in (layout.training, layout.validation)]
    sizes_of = Counter(headers[image].extents for image in usable)
    return DataSurvey(
        kept[0] or kept[1], kept[1] if kept[0] else (), common.channels, common.dtype, sizes_of, values, counted,
        unusable,
    )  # fmt: skip


def headers_of(pairs: Sequence[Pair], progress: Progress) -> tuple[dict[Path, SampleHeader], dict[Path, str]]:
    """What the files of each pair say of themselves, as training reads them; and why some pairs cannot be used."""
    samples = [Sample(str(image), image, target) for image, target in pairs]
    found = told("files", lambda i: header(samples, i, 0, Pixels()), range(len(pairs)), progress)
    every = dict(zip((image for image, _ in pairs), found, strict=True))
    good = {image: each for image, each in every.items() if isinstance(each, SampleHeader)}
    bad = {image: each.reason for image, each in every.items() if isinstance(each, Unusable)}
    if not good:
        check_mask_channels(pairs)
        check_some(good, bad)
    return good, bad


def most_common(headers: dict[Path, SampleHeader]) -> SampleHeader:
    """The header of an image of the most frequent kind: channels, type and number of dims."""
    kinds = Counter(tuple(each.code) for each in headers.values())
    chosen = kinds.most_common(1)[0][0]
    return next(each for each in headers.values() if tuple(each.code) == chosen)


def kind_of(found: SampleHeader) -> str:
    """Channels, type and dims of an image, in words."""
    return f"{channels_in_words(found.channels, found.dtype)} in {len(found.extents)}D"


def channels_in_words(channels: int, dtype: torch.dtype) -> str:
    """Channels and their type.

    >>> channels_in_words(3, torch.uint8), channels_in_words(1, torch.int16)
    ('3 channels of uint8', '1 channel of int16')
    """
    return f"{channels} channel{'s' * (channels != 1)} of {str(dtype).removeprefix('torch.')}"


def check_mask_channels(pairs: Sequence[Pair]) -> None:
    """Raise where masks are pictures in colours."""
    mask = pairs[0][1]
    if not isinstance(mask, Path):
        return
    try:
        with open_source(mask, threads=1) as source:
            channels = source.shape[0]
    except DataError:
        return
    if channels in (2, 3, 4):
        raise DataError(
            f"{mask}: the mask has {channels} channels, as a picture in colours has. A mask has one channel, with the "
            f"number of a class at each position: if all channels are equal, save the first one alone; if colours "
            f"stand for classes, write their numbers instead; if each channel is a label of its own, write a run with "
            f'data.mask = "channels" and loss.name = "bce" by hand',
            str(mask),
        )


def check_every_class(layout: FolderLayout, pairs: Sequence[Pair], usable: Container[Path]) -> None:
    """Raise where folders are taken for classes, and no image of one of them can be used."""
    used = {number for image, number in pairs if image in usable}
    for number, name in enumerate(layout.classes):
        if number not in used:
            raise DataError(
                f"there are no masks, so folders were taken for classes; but no image in {name} is like the others. If "
                f"it holds masks, name both by --images and --masks"
            )


def check_some(usable: Iterable[Path], unusable: dict[Path, str]) -> None:
    """Raise where no image can be used."""
    if any(True for _ in usable):
        return
    if all(path.suffix.lower() == ".gz" for path in unusable):
        place = os.path.commonpath([path.parent for path in unusable])
        raise DataError(
            f"all {len(unusable)} volumes are compressed NIfTI, of which parts cannot be read. Unpack them, masks too, "
            f"and run this again: find {Path(place).parent} -name '*.nii.gz' -exec gunzip --keep {{}} +"
        )
    reasons = "".join(f"\n  {reason}" for reason in [*unusable.values()][:SHOWN])
    more = f"\n  and {len(unusable) - SHOWN} more" if len(unusable) > SHOWN else ""
    raise DataError(f"none of the {len(unusable)} images with their masks can be used:{reasons}{more}")
