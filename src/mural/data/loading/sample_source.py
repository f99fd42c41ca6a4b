"""Samples of a batch as sources: image and mask as the model takes them, read window by window."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mural import geometry
from mural.data.loading.piece_reader import MOST_AT_ONCE, Reader, SamplePiece
from mural.data.loading.read_ahead import NOT_THE_SAMPLE, in_words
from mural.data.source import Box, Level, Source, checked_box, level_of
from mural.errors import DataError
from mural.geometry import whole
from mural.geometry.tile_grid import split


class SampleSource(Source):
    """The image that a model sees of one sample in one epoch, or its mask: cropped, turned, scaled, recoloured.

    A window holds what the same window of a batch in memory would hold, and however often it is read, since all windows
    see the one draw of their sample. Threads may read at the same time. A mask has its channels first too, and says
    whether the loss takes it without: it is `flat` then, as classes and values are, and has one.
    """

    def __init__(self, reader: Reader, piece: SamplePiece, mask: bool = False):
        source, pixels = piece.mask if mask and piece.mask is not None else piece.image, reader.pixels
        self.reader, self.piece, self.mask = reader, piece, mask
        self.flat = mask and pixels.mask != "channels"
        self.name, self.counter = source.name, source.counter
        self.shape = (piece.form.width if mask else piece.form.channels, *piece.form.extents)
        self.dtype = pixels.target_dtype if mask else pixels.dtype
        self.levels = (Level(self.shape, (1.0,) * len(self.shape)),)
        self.chunks = (source.chunks[0], *(source.chunks[1 + d] for d in piece.view.turn.dims))

    def windows(self) -> tuple[geometry.Box, ...]:
        """Boxes that cover all of it, each a few tiles of the file: what one looks at who looks at everything."""
        channels, *extents = whole(self.shape)
        return tuple((channels, *box) for box in split(tuple(extents), self.chunks[1:], 1, MOST_AT_ONCE))

    def read(self, box: Box | None = None, level: int = 0) -> Tensor:
        level_of(self, level)
        channels, *window = checked_box(self.name, box, self.shape)
        piece = replace(self.piece, box=tuple(window))
        found = torch.empty((self.shape[0], *(i.size for i in window)), dtype=self.dtype)
        image, target = (None, found[0] if self.flat else found) if self.mask else (found, None)
        try:
            for fill in self.reader.tasks(piece, image, target, 1):
                fill()
        except NOT_THE_SAMPLE:
            raise
        except Exception as error:
            raise DataError(in_words(piece.name, piece.view.behind(piece.box), error), self.name, box) from error
        return found[channels.start : channels.stop]
