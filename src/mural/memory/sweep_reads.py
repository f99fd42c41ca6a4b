"""What sweeps read from the host, tile by tile, so that it comes while another one goes on, or stays here.

pass 3   0 1 2 3 4 5 6 7      writes y; its bands 5, 6, 7 stay
pass 4   7 6 5 4 3 2 1 0      reads y; 4, 3, … come meanwhile, and the first bands of what pass 5 reads
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mural.geometry import Box
from mural.graph.nodes import Place
from mural.memory.host_memory import HostRows
from mural.memory.host_tensor import HostTensor
from mural.memory.read_plan import Read
from mural.memory.sweeps import Sweep
from mural.memory.tile_task import Coordinates

if TYPE_CHECKING:
    from mural.memory.tile_sweeps import TileSweeps

SWEEPS_AHEAD = 1
"""How many sweeps are looked at, after the one that begins."""


@runtime_checkable
class OnHost(Protocol):
    """A value that is on the host, or may be."""

    def reads_ahead(self, boxes: Sequence[Box | None], adds: bool) -> list[list[Read]]:
        """What is read for windows in order, of values, and of gradients where it `adds` to those of other passes."""
        ...


def begin_sweep(streamer: TileSweeps, sweep: Sweep) -> list[Coordinates]:
    """The tiles of a sweep that begins, down the image and up in turn if values are on the host; it is planned what it
    and the next one read.
    """
    one, memory = sweep.one, streamer.memory if streamer.host else None
    turn = 0 if memory is None else memory.bands.sweeps
    tiles = in_turn(streamer.tiles(one), turn)
    for place in one.reads:
        boxes = [box for at in tiles if (box := streamer.needs.window(one, place, at)) is not None]
        streamer.source(place).plan(boxes)
    for place in one.keeps:
        if sweep.back and isinstance(kept := streamer.kept.get(place), HostTensor):
            kept.end_windows()
    if memory is not None:
        while streamer.coming and streamer.coming.popleft().key != sweep.key:
            pass
        memory.begin_sweep(planned_reads(streamer, [sweep, *islice(streamer.coming, SWEEPS_AHEAD)], turn))
    return tiles


def in_turn(tiles: list[Coordinates], turn: int) -> list[Coordinates]:
    """The tiles of the sweep with that number, in its order."""
    return tiles[::-1] if turn % 2 else tiles


def planned_reads(streamer: TileSweeps, sweeps: Sequence[Sweep], turn: int) -> list[list[Read]]:
    """What each tile of some sweeps in a row reads; `turn` is the number of the first one.

    What an earlier one of them writes is not settled in a later one: it cannot be brought before.
    """
    found: list[list[Read]] = []
    written: set[HostRows] = set()
    for sweep in sweeps:
        if not sweep.one.whole:
            tiles = tile_reads(streamer, sweep, in_turn(streamer.tiles(sweep.one), turn))
            found += [[read._replace(settled=read.rows not in written) for read in tile] for tile in tiles]
            turn += 1
        for place, gradient in sweep.writes:
            if isinstance(kept := stored(streamer, place), HostTensor):
                written.add(kept.grads if gradient else kept.values)
    return found


def tile_reads(streamer: TileSweeps, sweep: Sweep, tiles: Sequence[Coordinates]) -> Iterator[list[Read]]:
    """What each tile of a sweep reads."""
    one, needs = sweep.one, streamer.needs
    columns: list[list[list[Read]]] = []
    for place in one.reads:
        if isinstance(source := stored(streamer, place), OnHost):
            boxes = [needs.window(one, place, at) for at in tiles]
            columns.append(source.reads_ahead(boxes, sweep.writes_gradients))
    for place in one.keeps if sweep.back else ():
        if isinstance(kept := stored(streamer, place), HostTensor):
            columns.append(kept.gradients_ahead([needs.kept_box(one, place, at) for at in tiles]))
    return (list(chain(*(column[number] for column in columns))) for number in range(len(tiles)))


def stored(streamer: TileSweeps, place: Place) -> object:
    """Where a value is read from, or will be; None if that is not on the host."""
    if isinstance(place[0], str):
        return streamer.inputs.get(place[0])
    return streamer.store(place) if place in streamer.host else None
