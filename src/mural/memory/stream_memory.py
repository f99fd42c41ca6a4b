"""The memory of a streamed step, before it runs: the step itself, on tensors without memory, with its largest tiles.

Everything is counted where it happens: parameters, gradients, kept values, windows, and what autograd keeps of a tile.
Of each pass run the tiles of the kinds that there are, each after the one before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from mural.comm.host_staging import PageableMemory
from mural.geometry import Cuts, Interval
from mural.graph.nodes import Place
from mural.memory.call_probe import ALONE
from mural.memory.device_bands import RecentBand
from mural.memory.host_memory import HostMemory, HostRows
from mural.memory.meta_kernels import GpuTally
from mural.memory.passes import Passes, StreamPass
from mural.memory.stream import Streamer
from mural.memory.sweeps import Sweep
from mural.memory.tile_needs import Needs
from mural.memory.tile_task import Coordinates, TileInput
from mural.shard.meta_autocast import meta_autocast

META = torch.device("meta")


@dataclass(frozen=True)
class StreamPeak:
    """The sweeps of a step in order, with their peaks, and the types of the values that it kept."""

    sweeps: tuple[Sweep, ...]
    kept: Mapping[Place, torch.dtype]
    state: int
    """Bytes that are there before: parameters, buffers, gradients and inputs on the device."""

    @property
    def bytes(self) -> int:
        """The peak of the step."""
        return max((sweep.peak for sweep in self.sweeps), default=self.state)


class MetaRows(HostRows):
    """Rows on the host, of which those count that are on the device and have no place in the block for bands."""

    going: Tensor | None = None

    def begin(self, dtype: torch.dtype, instead: HostRows | None = None) -> None:
        """Take no memory."""
        self.buffer, self.dtype = PageableMemory(0), dtype
        self.rows = torch.empty((), dtype=dtype, device=META).expand(self.shape)
        self.users.append(self)

    def write(self, image: int, at: Interval, band: Tensor) -> None:
        """Send a band of rows to the host."""
        bands = self.memory.bands
        bands.forget(self, image, at)
        found = bands.take(band.shape, band.dtype)
        self.going = band if found is None else None
        if found is not None:
            bands.keep(RecentBand(self, image, at, found[0], None, found[1]))

    def drop(self) -> None:
        """Nothing travels any more."""
        super().drop()
        self.going = None


class MetaHostMemory(HostMemory):
    """A host without memory."""

    def rows(self, shape: tuple[int, ...]) -> HostRows:
        """A tensor, (images, rows, …), without memory as yet."""
        return MetaRows(self, shape)


class MetaStreamer(Streamer):
    """A step without memory: its largest tiles alone."""

    def __init__(
        self, passes: Passes, needs: Needs, inputs: Mapping[str, TileInput], held: Mapping[str, Tensor],
        hosted: Collection[Place], tally: GpuTally,
    ):  # fmt: skip
        cuts = {axis: Cuts.of((0, cut.bounds[-1])) for axis, cut in needs.grid.cuts.items()}
        super().__init__(passes, needs, inputs, held, ALONE, cuts, META, lambda _: None)
        self.memory = self.host_memory = MetaHostMemory(META)
        self.host, self.tally = frozenset(hosted), tally
        self.sweeps: list[Sweep] = []
        self.types: dict[Place, torch.dtype] = {}

    def tiles(self, one: StreamPass) -> list[Coordinates]:
        """Tiles of the kinds that there are: at the image's rim, where convolutions pad what they read, and inside."""
        every = super().tiles(one)
        if not every:
            return every
        kinds = {axis: self._kinds(one, axis) for axis in every[0]}
        found: set[int] = set()
        for at in product(*kinds.values()):
            place = every.index(dict(zip(kinds, at, strict=True)))
            found |= {max(0, place - 1), place}  # what is left of the tile before is there, too
        return [every[place] for place in sorted(found)]

    def _kinds(self, one: StreamPass, axis: str) -> list[int]:
        """The coordinates along an axis whose tiles differ: the larger of both ends, and the largest between them.

        The last rather than the first: it finds the gradients of others.
        """
        *first, last = self.needs.grid_of(one).coordinates(axis)
        if axis == "data" or not first:
            return [*first, last][:1]

        def held(coordinate: int) -> int:
            return sum(interval.size for interval in self.needs.along(one, axis, coordinate).values.values())

        return [max(last, first[0], key=held), *sorted(first[1:], key=held)[-1:]]

    def _rescale(self, factor: Tensor) -> None:
        """Nothing: numbers are not known."""

    # -- sweeps --------------------------------------------------------------------------------------------------------

    def _told(self, one: StreamPass, name: str) -> Iterator[Coordinates]:
        self.begin(one, name)
        yield from super()._told(one, name)

    def run(self, one: StreamPass) -> None:
        """One pass forward."""
        if one.whole:
            self.begin(one, "forward")
        super().run(one)

    def run_backward(self, one: StreamPass) -> None:
        """One pass backward."""
        if one.whole:
            self.begin(one, "backward")
        super().run_backward(one)

    def _last(self, last: StreamPass, weight: float) -> Tensor:
        if last.whole:
            self.begin(last, "forward and backward")
        return super()._last(last, weight)

    def begin(self, one: StreamPass, kind: str) -> None:
        """Note the peak of the sweep that ends, and begin another."""
        self.end()
        before = self.sweeps[-1] if self.sweeps else None
        if before is not None and before.one is one and before.kind.startswith("forward and"):
            self.sweeps.pop()  # it was tried, and is not possible
        self.sweeps.append(Sweep(one, kind))
        self.tally.forget()

    def end(self) -> None:
        """Note the peak of the sweep that ends."""
        if self.sweeps:
            self.sweeps[-1] = replace(self.sweeps[-1], peak=max(self.sweeps[-1].peak, self.tally.peak))
        for place, kept in self.kept.items():
            if kept.values is not None and (isinstance(kept.values, Tensor) or kept.values.there):
                self.types[place] = kept.values.dtype


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, type and memory format, without memory."""
    made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def stream_peak(
    passes: Passes, needs: Needs, inputs: Mapping[str, TileInput], held: Mapping[str, Tensor], *,
    lower: torch.dtype | None = None, hosted: Collection[Place] = (), there: Sequence[Tensor] = (), more: int = 0,
    training: bool = True, blocks: Mapping[int, str] | None = None, bands: int = 0,
) -> StreamPeak:  # fmt: skip
    """The peak of a step, and of each of its sweeps.

    `inputs` give windows without memory; `there` are tensors of them that are on the device as a whole. `held` are
    parameters, buffers and constants, `hosted` the kept values that are on the host. Under autocast, `lower` is its
    type. `more` are other bytes on the device: gradients of earlier steps, and what torch's libraries hold. `blocks`
    has the block of each call that backward computes again; `bands` are the bytes through which `hosted` ones pass.
    """
    tally = GpuTally()
    tally.hold(more)
    same = {name: without_memory(tensor) for name, tensor in held.items()}
    for tensor in (*same.values(), *there):
        tally.hold(tally.rounded(tensor.untyped_storage().nbytes()))
    tally.ignore([*same.values(), *there])
    streamer = MetaStreamer(passes, needs, inputs, same, hosted, tally)
    streamer.blocks = blocks or {}
    state = tally.live
    generator = torch.get_rng_state()
    try:
        with tally, meta_autocast(lower), torch.set_grad_enabled(training):
            streamer.host_memory.begin(bands)
            streamer.step() if training else streamer.infer()
            streamer.end()
    finally:
        torch.set_rng_state(generator)
    return StreamPeak(tuple(streamer.sweeps), streamer.types, state)
