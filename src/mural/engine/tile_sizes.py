"""Tiles of a plan: how large they are in each pass, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from mural.engine.stream_program import StreamProgram
from mural.geometry import Cuts
from mural.memory.choice import pass_weight
from mural.memory.tile_needs import TileGrid, grid_of
from mural.ranks import SPATIAL, Mesh

MOST_TIMES = 8.0
"""How many times as large the tiles of a pass may be that makes little of them."""
LEAST_BANDS = 16
"""How many bands a pass has at least, unless tiles are larger: the first one travels while nothing computes.

Half as many where a pass makes so little of them that the host takes longer to queue their calls.
"""


def tile_grids(
    program: StreamProgram, image: tuple[int, ...], tile: Sequence[int], shared: Mapping[str, Cuts], mesh: Mesh
) -> tuple[TileGrid, dict[int, TileGrid]]:
    """The grid of tiles, and larger tiles for passes that make less of them, so that all need as much memory."""
    extents = {"data": image[0], **dict(zip(SPATIAL, image[2:], strict=False))}
    sizes: dict[str, int] = dict(zip(SPATIAL, tile, strict=False))
    stride = total_stride(program, extents)
    ranks = {axis: (cuts, mesh.coordinates[axis]) for axis, cuts in shared.items()}
    bands = bool(program.kept.host)

    def grid(times: float) -> TileGrid:
        chosen = as_bands(sizes, extents, times) if bands else enlarged(sizes, times)
        parts = {axis: max(i.size for i in ranks[axis][0].intervals()) for axis in chosen}
        rounded = {axis: even(size, parts[axis], stride) for axis, size in chosen.items()}
        return grid_of(extents, {"data": 1, **rounded}, ranks)

    passes, graph = program.passes, program.tiles
    if len(passes.passes) == 1 or program.follows:
        return grid(1.0), {}
    every = pass_weight(replace(passes.passes[0], calls=graph.calls), graph)
    weights = {one.number: pass_weight(one, graph) for one in passes.passes if not one.whole}
    times = {number: min(MOST_TIMES, max(1.0, every / w / 2)) for number, w in weights.items() if w > 0}
    return grid(1.0), {number: grid(each) for number, each in times.items()}


def total_stride(program: StreamProgram, extents: dict[str, int]) -> int:
    """By how much the model divides the image's extents, where that many positions are left for tiles."""
    found = 1
    for value in program.tiles.values.values():
        for axis, extent in value.extents.items():
            if axis in SPATIAL and extent > 1 and extents[axis] // extent > found:
                ratio = round(extents[axis] / extent)
                found = ratio if ratio * 4 <= extents[axis] else found
    return found


def even(size: int, extent: int, stride: int) -> int:
    """A tile of about that size, and of whole strides, that leaves no small rest.

    The tile before a rest that is smaller than the margins would have a shape of its own.

    >>> even(48, 100, 4), even(48, 96, 4), even(13, 100, 4)
    (36, 48, 16)
    """
    rounded = max(1, -(-size // stride) * stride)
    count = max(1, -(-extent // rounded))
    return max(1, -(-extent // (count * stride)) * stride)


def enlarged(tile: dict[str, int], times: float) -> dict[str, int]:
    """A tile of the same form with about that many times the positions.

    >>> enlarged({"spatial0": 64, "spatial1": 32}, 4.0)
    {'spatial0': 128, 'spatial1': 64}
    """
    return {axis: int(size * times ** (1 / len(tile))) for axis, size in tile.items()}


def as_bands(tile: dict[str, int], extents: dict[str, int], times: float = 1.0) -> dict[str, int]:
    """Bands of whole rows with as many positions as a tile: what is kept on the host is kept by rows.

    >>> as_bands({"spatial0": 64, "spatial1": 64}, {"spatial0": 1024, "spatial1": 512})
    {'spatial0': 8, 'spatial1': 512}
    """
    rest = {axis: extents[axis] for axis in tile if axis != SPATIAL[0]}
    area = prod(min(size, extents[axis]) for axis, size in tile.items()) // max(1, prod(rest.values()))
    most = max(area, int(max(1.0, 2 * times / MOST_TIMES) * extents[SPATIAL[0]] / LEAST_BANDS))
    return {SPATIAL[0]: max(1, min(int(times * area), most)), **rest}
