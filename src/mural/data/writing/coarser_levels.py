"""The coarser levels of an image under way: each from the one before, unit by unit, by all ranks."""

from __future__ import annotations

from itertools import pairwise, product

from mural.comm.failure.agree import together
from mural.data.writing.downsample import halve
from mural.data.writing.stores import Store
from mural.errors import DataError
from mural.geometry import Box, Interval
from mural.geometry.tile_grid import grid, tile_at
from mural.ranks import Mesh


def fill_levels(name: str, store: Store, mesh: Mesh | None) -> None:
    """Write all levels after the first, which is complete; the store is closed before and after. Collective.

    A rank sees what others wrote when they closed the file, and it opened the file since: so it is between two levels.
    """
    for finer, coarser in pairwise(range(len(store.levels))):
        with together(mesh, f"level {coarser} of {name}", DataError):
            store.open()
            try:
                source, target = store.levels[finer], store.levels[coarser]
                for box in shares(target.shape, target.unit, mesh):
                    pixels = source.get(doubled(box, source.shape, store.halved))
                    target.put(box, halve(pixels, store.method, store.halved))
            finally:
                store.close()


def shares(shape: tuple[int, ...], unit: tuple[int, ...], mesh: Mesh | None) -> list[Box]:
    """The units of an image that this rank writes, as boxes: the others write the rest."""
    boxes = [tile_at(index, unit, shape) for index in product(*map(range, grid(shape, unit)))]
    return boxes if mesh is None else boxes[mesh.everyone.index(mesh.rank) :: len(mesh.everyone)]


def doubled(box: Box, finer: tuple[int, ...], dims: int) -> Box:
    """What a box of a level is made of in the one before, which has this shape.

    >>> doubled((Interval(0, 1), Interval(2, 4), Interval(0, 3)), (1, 9, 5), 2)
    (Interval(start=0, stop=1), Interval(start=4, stop=8), Interval(start=0, stop=5))
    """
    last = zip(box[-dims:], finer[-dims:], strict=True)
    return *box[:-dims], *(Interval(2 * i.start, min(2 * i.stop, n)) for i, n in last)
