"""Writing an image piece by piece, from one process or from several ranks at once, to OME-Zarr, TIFF or NIfTI.

A file has units (chunks, shards or tiles) that are written as a whole, so no two processes may write one at the same
time. Pieces need not end where units do:

    unit 0      unit 1      unit 2          rank 0's piece covers unit 0: written at once, by rank 0 alone.
    |-----------|-----------|-----------|   unit 1 has a part of each rank: each keeps its part (a rim) until
    |== rank 0 ======|== rank 1 ========|   `close`, where the lowest rank among them gets the others' parts by
                                            message, and writes the unit once.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from mural.comm.failure.agree import gather, together
from mural.data.formats.dtypes import TORCH, Array, numpy_dtype, to_array
from mural.data.pixel_grid import PixelGrid
from mural.data.source import Box, checked_box, pairs
from mural.data.writing.coarser_levels import fill_levels
from mural.data.writing.gather import settle
from mural.data.writing.nifti_store import NiftiStore
from mural.data.writing.output import Output, kind_of, unwritable
from mural.data.writing.rims import Rims
from mural.data.writing.stores import Store, ZarrStore
from mural.data.writing.tiff_store import TiffStore
from mural.data.writing.zarr_write import check_dtype, check_shape
from mural.errors import DataError
from mural.geometry import Box as Place
from mural.geometry import Interval, overlap, slices, volume
from mural.geometry.tile_grid import Index, tile_at, touched
from mural.ranks import Mesh


class Writer:
    """An image under way. `write` is for each rank by itself; `close` is for all of them together.

    The image takes its name when `close` is through. Leaving a `with` block by an error gives it up instead.
    """

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: torch.dtype, store: Store, output: Output, mesh: Mesh | None
    ):
        self.name, self.path, self.shape, self.dtype = str(path), path, shape, dtype
        self._store, self._output, self._mesh = store, output, mesh
        self._level = store.levels[0]
        rank = mesh.rank if mesh is not None else 0
        self._rims = Rims(numpy_dtype(dtype), path.parent, f".{path.name}.{output.token}.rims-{rank}.")
        self._written: set[Index] = set()
        self._closed = False
        # Whoever forgets `close`, or is interrupted, leaves nothing behind.
        self._forgotten = weakref.finalize(self, give_up, store, output, self._rims, is_first(mesh))

    @property
    def unit(self) -> tuple[int, ...]:
        """What is written as a whole: pieces that are made of units need no second look."""
        return self._level.unit

    def write(self, box: Box, tensor: torch.Tensor) -> None:
        """Write a piece, channels first. Pieces of one rank may overlap: the later counts; those of two may not."""
        place = checked_box(self.name, box, self.shape)
        if self._closed:
            raise DataError(f"{self.name}: it was closed: write before close()", self.name, pairs(place))
        extents = tuple(interval.size for interval in place)
        if tuple(tensor.shape) != extents or tensor.dtype != self.dtype:
            raise DataError(
                f"{self.name}: a tensor {tuple(tensor.shape)} of {tensor.dtype} does not fill box {pairs(place)} of "
                f"{self.dtype}: its shape must be {extents}, and .to({self.dtype}) changes its type",
                self.name,
                pairs(place),
            )
        if not volume(place):
            return
        try:
            self._put(place, to_array(tensor))
        except (OSError, ValueError) as error:
            raise unwritable(self.path, error, f"box {pairs(place)}", pairs(place)) from error

    def _put(self, place: Place, pixels: Array) -> None:
        """Write the units that the piece covers in one go, and keep its rim."""
        inner = tuple(covered(i, unit, n) for i, unit, n in zip(place, self.unit, self.shape, strict=True))
        if volume(inner):
            for index in touched(inner, self.unit):
                self._rims.drop(index)
                self._written.add(index)
            self._level.put(inner, pixels[slices(inner, place)])
        for index in touched(place, self.unit):
            unit = tile_at(index, self.unit, self.shape)
            if volume(inner) and overlap(unit, inner) == unit:
                continue
            part = overlap(unit, place)
            if index in self._written:
                whole_unit = self._level.get(unit)
                whole_unit[slices(part, unit)] = pixels[slices(part, place)]
                self._level.put(unit, whole_unit)
                continue
            rim = self._rims.take(index, unit)
            rim.paste(part, pixels[slices(part, place)])
            if rim.missing:
                self._rims.keep(index, rim)
            else:
                self._level.put(unit, rim.pixels)
                self._written.add(index)

    def close(self) -> None:
        """Write what is left, and give the image its name; pixels that nobody wrote are zero. All ranks call it."""
        if self._closed:
            return
        self._closed = True
        try:
            settle(self.name, self._level, self._rims, self._written, self._mesh)
            with together(self._mesh, f"closing {self.path.name}", DataError):
                self._store.close()
            fill_levels(self.name, self._store, self._mesh)
            with together(self._mesh, f"naming {self.path.name}", DataError):
                if is_first(self._mesh):
                    self._store.seal()
                    self._output.finish()
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._forgotten()

    def _tell(self, error: BaseException) -> None:
        """Release the peers that wait for this rank; where all raised, nobody waits."""
        if self._mesh is not None:
            self._mesh.transport.raised(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        self._closed = True
        self._tell(error)
        self._forgotten()


def covered(interval: Interval, unit: int, extent: int) -> Interval:
    """The part of an interval that whole units make up; the last unit may be cut off by the extent.

    >>> covered(Interval(3, 10), 4, 10), covered(Interval(3, 9), 4, 10)
    (Interval(start=4, stop=10), Interval(start=4, stop=8))
    """
    start = -(-interval.start // unit) * unit
    stop = interval.stop if interval.stop == extent else interval.stop // unit * unit
    return Interval(start, max(start, stop))


def is_first(mesh: Mesh | None) -> bool:
    """Whether this rank does what one does for all."""
    return mesh is None or mesh.rank == (mesh.ranks[0] if mesh.ranks else 0)


def give_up(store: Store, output: Output, rims: Rims | None, first: bool) -> None:
    """Release everything; the first rank removes what was written, unless it has its name."""
    store.close()
    if rims is not None:
        rims.close()
    if first:
        output.abandon()


def create(
    path: str | os.PathLike[str],
    shape: Sequence[int],
    dtype: torch.dtype | np.dtype[Any] | type | str,
    *,
    mesh: Mesh | None = None,
    chunks: Sequence[int] | None = None,
    shard: Sequence[int] | None = None,
    overwrite: bool = False,
    grid: PixelGrid | None = None,
    levels: int | None = 1,
    labels: bool = False,
) -> Writer:
    """A writer of a new image (C, H, W) or (C, D, H, W), to which pieces are written in any order.

    OME-Zarr where the path ends in .zarr, tiled BigTIFF without compression for .tif, and for .nii a NIfTI of a volume.
    With a mesh of several ranks, all of them call this, then each writes its own pieces, then all call `close`; they
    need one file system. `grid` says how large the pixels are and where they lie: see `mural.data.pixel_grid`.
    `chunks` has one extent per dim (of a TIFF, the last two are its tile); `shard` puts several chunks of a Zarr into
    one file. `levels` and `labels` are as for `mural.data.convert`, but that there is one level unless more are wanted;
    coarser ones are made in `close`.
    """
    where = Path(path).expanduser()
    kind, extents, kept = kind_of(where), check_shape(str(path), shape), check_dtype(str(path), dtype)
    first, *_ = gather(mesh, secrets.randbits(31), f"creating {where.name}").values()
    output = Output(where, overwrite, f"{first:08x}")
    known = PixelGrid() if grid is None else grid
    if levels is not None and levels < 1:
        raise DataError(f"{where}: levels={levels}: there is at least one, the full resolution", str(where))
    method = "nearest" if labels or kept == np.bool_ else "mean"
    store: Store
    if kind == "zarr":
        store = ZarrStore(str(where), output.partial, extents, kept, chunks, shard, known.spacing, levels, method)
    elif kind == "nifti":
        store = NiftiStore(str(where), output.partial, extents, kept, known.affine)
    else:
        store = TiffStore(str(where), output.partial, extents, kept, chunks, known, levels, method)
    begin(where, store, output, mesh)
    return Writer(where, extents, TORCH[kept.name], store, output, mesh)


def begin(path: Path, store: Store, output: Output, mesh: Mesh | None) -> None:
    """Let the first rank make the image, and all open it."""

    def make() -> None:
        try:
            output.begin()
            store.make()
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise unwritable(path, error) from error

    try:
        with together(mesh, f"creating {path.name}", DataError):
            if is_first(mesh):
                make()
        with together(mesh, f"opening {path.name}", DataError):
            store.open()
    except BaseException:
        give_up(store, output, None, is_first(mesh))
        raise
