"""An image written on a coarser grid than its file has: kept as it comes, then enlarged box by box."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from mural.comm.failure.agree import gather
from mural.data.formats.dtypes import Array, to_array, to_tensor
from mural.data.open import open as open_source
from mural.data.source import Box, Source
from mural.data.writing.coarser_levels import shares
from mural.data.writing.write import Writer, create, is_first
from mural.geometry import Box as Place
from mural.geometry import Interval
from mural.ranks import Mesh


class EnlargedWriter:
    """Takes pieces of an image of one shape, as a `Writer`, and writes it with larger extents when it is closed.

    Pixels lie as those of a pyramid's level on its finest one. Whole numbers are labels: each new pixel takes the
    nearest one. Others are interpolated between their neighbours, two along each dim. `options` are those of `create`.
    """

    def __init__(
        self,
        path: Path,
        shape: Sequence[int],
        fine: Sequence[int],
        dtype: torch.dtype,
        *,
        mesh: Mesh | None = None,
        **options: Any,
    ):
        self.path, self.fine, self.dtype, self.mesh, self.options = path, (shape[0], *fine), dtype, mesh, options
        token, *_ = gather(mesh, secrets.randbits(31), f"creating {path.name}").values()
        self.folder = path.with_name(f".{path.name}.{token:08x}.coarse.partial")
        self.staged: Writer = create(self.folder / "coarse.ome.zarr", shape, dtype, mesh=mesh)
        self.shape = self.staged.shape

    def write(self, box: Box, tensor: torch.Tensor) -> None:
        """Write a piece, channels first."""
        self.staged.write(box, tensor)

    def close(self) -> None:
        """Enlarge the image, and give it its name. All ranks call it."""
        try:
            self.staged.close()
            made = create(self.path, self.fine, self.dtype, mesh=self.mesh, **self.options)
            with made as writer, open_source(self.staged.path) as coarse:
                for box in shares(writer.shape, writer.unit, self.mesh):
                    writer.write(box, to_tensor(enlarged(coarse, box, writer.shape)))
        finally:
            self._remove()

    def _remove(self) -> None:
        if is_first(self.mesh):
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        self.staged.__exit__(kind, error, at)
        self._remove()


def enlarged(coarse: Source, box: Place, shape: Sequence[int]) -> Array:
    """A box of an image of that shape, made from what lies there in a coarser one."""
    steps = [pixels_per(fine, few) for fine, few in zip(shape[1:], coarse.shape[1:], strict=True)]
    # Where the centres of pixels lie on the coarse grid, on which a pixel's centre is at its number.
    at = [(np.arange(*i) + 0.5) / step - 0.5 for i, step in zip(box[1:], steps, strict=True)]
    whole_numbers = not coarse.dtype.is_floating_point
    places = [(np.floor(c + 0.5) if whole_numbers else np.floor(c)).astype(np.int64) for c in at]
    reach = 0 if whole_numbers else 1
    ends = [
        Interval(min(max(int(p[0]), 0), n - 1), min(max(int(p[-1]) + reach, 0), n - 1) + 1)
        for p, n in zip(places, coarse.shape[1:], strict=True)
    ]
    found = to_array(coarse.read((box[0], *ends)))
    for dim, (place, centre, end) in enumerate(zip(places, at, ends, strict=True), start=1):
        low, high = (np.clip(place + more, end.start, end.stop - 1) - end.start for more in (0, reach))
        first = np.take(found, low, dim)
        if reach:
            share = (centre - place).astype(found.dtype).reshape(-1, *(1,) * (found.ndim - dim - 1))
            first += (np.take(found, high, dim) - first) * share
        found = first
    return found


def pixels_per(fine: int, coarse: int) -> float:
    """How many pixels of an extent one pixel of a coarser one stands for: whole where halving rounds up to it.

    >>> pixels_per(1001, 501), pixels_per(1000, 400)
    (2, 2.5)
    """
    near = round(fine / coarse)
    return near if near and -(-fine // near) == coarse else fine / coarse
