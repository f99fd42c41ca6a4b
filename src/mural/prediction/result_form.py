"""How results are written: on which grid, and with which levels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mural.data import open as open_source
from mural.data.pixel_grid import pixel_grid
from mural.data.source import level_of
from mural.data.writing.enlarged import pixels_per
from mural.errors import ConfigError
from mural.train.prediction_files import FileForm

ResultGrid = Literal["source", "level"]
LARGE = 4096
"""Results with a longer side than this have levels, unless it is said otherwise."""


@dataclass(frozen=True)
class ResultStyle:
    """What the caller said of results: the grid, the finest of an image or that of the level that was read; and whether
    there are levels (None: of large ones, and where a map has them).
    """

    grid: ResultGrid = "source"
    pyramid: bool | None = None

    def __post_init__(self) -> None:
        if self.grid not in get_args(ResultGrid):
            raise ConfigError(f'grid = "{self.grid}" is not one of {", ".join(get_args(ResultGrid))}')

    def described(self, level: int) -> dict[str, str | int]:
        """What of it tells files apart: nothing for runs that read the finest level."""
        return {"grid": self.grid} if level else {}

    def form(self, image: Path, level: int) -> FileForm:
        """How the result of an image is written that a model gives on one of its levels."""
        with open_source(image) as source:
            finest, read = source.shape[1:], level_of(source, level).shape[1:]
        grid = pixel_grid(image)
        fine = finest if self.grid == "source" else read
        if fine != finest:
            grid = grid.coarser(tuple(pixels_per(a, b) for a, b in zip(finest, read, strict=True)))
        auto = max(fine) > LARGE or (grid.geo is not None and grid.geo.optimized)
        levels = None if (auto if self.pyramid is None else self.pyramid) else 1
        return FileForm(grid, fine, levels)


def extents_at(image: Path, level: int) -> tuple[int, ...]:
    """The spatial extents of an image at a level."""
    with open_source(image) as source:
        return level_of(source, level).shape[1:]
