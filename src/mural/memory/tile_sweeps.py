"""Sweeps: all tiles of one pass, forward or backward, with what they read, keep and add up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mural.geometry import Cuts
from mural.graph.differentiable import carries, differentiable
from mural.graph.nodes import Place
from mural.memory.host_memory import HostMemory
from mural.memory.host_tensor import HostTensor
from mural.memory.joined_passes import Join, joined_passes
from mural.memory.kept_tensors import KeptTensor
from mural.memory.parameter_sums import ParameterSums
from mural.memory.passes import Passes, StreamPass, TotalKey
from mural.memory.sweep_reads import begin_sweep
from mural.memory.sweeps import Sweep
from mural.memory.tile_function import TileFunction, TileGiven, TileMade, Wanted, as_tile
from mural.memory.tile_needs import Needs
from mural.memory.tile_task import Chunk, Coordinates, TileInput, chunk_of
from mural.memory.tile_totals import Totals, in_order
from mural.ranks import Mesh
from mural.shard.tiles import OwnMoments

Progress = Callable[[int, int, str], None]
QUEUED, QUEUED_BANDS = 6, 2
"""How many tiles a GPU is asked for before it has computed them: fewer, if values pass through to the host."""


class TileSweeps:
    """Goes through all tiles of a pass, forward or backward."""

    def __init__(
        self,
        passes: Passes,
        needs: Needs,
        inputs: Mapping[str, TileInput],
        held: Mapping[str, Tensor],
        mesh: Mesh,
        cuts: Mapping[str, Cuts],
        device: torch.device,
        before_random: Callable[[int], None],
        progress: Progress | None = None,
    ):
        self.passes, self.needs, self.inputs, self.held = passes, needs, inputs, held
        self.mesh, self.cuts, self.device = mesh, cuts, device
        self.before_random, self.progress = before_random, progress
        self.totals = Totals(mesh)
        self.kept: dict[Place, KeptTensor | HostTensor] = {}
        self.host: frozenset[Place] = frozenset()
        self.memory: HostMemory | None = None
        """Where the values of `host` are kept."""
        self.queued: deque[Any] = deque()
        self.results = {(o.source, o.pick) for o in passes.graph.graph.outputs}
        self.deliver: Callable[[Any, Mapping[Place, Any]], None] | None = None
        """Takes the tiles of the model's results, with what was read for them; they are not kept then."""
        self.read_again = {place for one in passes.passes for place in one.reads}
        self.blocks: Mapping[int, str] = {}
        """The block of each call that is computed again in backward."""
        self.meanwhile: Callable[[], None] | None = None
        """What there is to do while the device computes, before any effect of the step."""
        self.sums = ParameterSums()
        """Where tiles add up the gradients of parameters."""
        self.shared: dict[str, Tensor] = {}
        """The gradients of parameters that every rank finds as a whole."""
        self.learned: list[tuple[TotalKey, OwnMoments, Tensor]] = []
        """Statistics that norms have yet to learn."""
        leaves = {name for name, given in inputs.items() if given.wanted}
        leaves |= {name for name, tensor in held.items() if tensor.requires_grad}
        self.graded = differentiable(passes.graph.graph, leaves=leaves)
        self.joins = joined_passes(passes)
        self.guesses: dict[Hashable, tuple[TotalKey, Tensor]] = {}
        """Of the last pass: its only total with a gradient, and the guess for it, by what its tiles are given."""
        self.coming: deque[Sweep] = deque()
        """The sweeps of the step that are expected, in order."""
        self.compute: Callable[[TileFunction, TileGiven], TileMade] = TileFunction.__call__
        """Computes a tile."""

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def tiles(self, one: StreamPass) -> list[Coordinates]:
        """This rank's tiles of a pass, in their fixed order; image by image where it reads no image dims."""
        values, grid = self.needs.graph.values, self.needs.grid_of(one)
        spatial = any(values[p].tiled for p in (*one.reads, *one.keeps))
        axes = [a for a in grid.cuts if spatial or a == "data"]
        return [dict(zip(axes, at, strict=True)) for at in product(*(grid.coordinates(a) for a in axes))]

    def given(
        self, one: StreamPass, at: Coordinates, grad: bool = False, of: Collection[TotalKey] | None = None
    ) -> TileGiven:
        """All that a tile depends on, read now; with gradients, those of some totals alone if they are named."""
        boxes = {place: self.needs.window(one, place, at) for place in one.reads}
        windows = {place: self.source(place).read(box) for place, box in boxes.items() if box is not None}
        held = {name: self.held[name] for name in one.names if name in self.held}
        chunks = (None, at.get("data"))
        mine = {*one.uses, *one.measures}
        known = {k: v for k, v in self.totals.values.items() if k[0] in mine and k[1] in chunks}
        if not grad:
            return TileGiven(windows, held, known)
        totals = {*one.uses} - {*one.measures} if of is None else {*of}
        of_totals = tuple(k for k in known if k[0] in totals & self.totals.differentiable)
        wanted = Wanted(known=of_totals) if of is not None else Wanted(
            tuple(place for place in windows if place in self.graded),
            tuple(name for name, tensor in held.items() if tensor.requires_grad),
            of_totals,
        )  # fmt: skip
        grads = {place: self.kept[place].gradient(self.needs.kept_box(one, place, at)) for place in one.keeps
                 if place in self.kept and self._counts(one, place, at)}  # fmt: skip
        adjoints = {k: v for k, v in self.totals.adjoints.items() if k[0] in one.measures and k[1] in chunks}
        found = {place: grad for place, grad in grads.items() if grad is not None}
        sums = {name: self.sums.place(name, held[name]) for name in wanted.held}
        return TileGiven(windows, held, known, wanted, found, adjoints, sums)

    def _counts(self, one: StreamPass, place: Place, at: Coordinates) -> bool:
        """Whether the gradient of a kept value is a tile's: of tiles that all make the same of it, the first one's."""
        axes, grid = self.needs.graph.values[place].extents, self.needs.grid_of(one)
        return all(axis in axes or number == grid.first[axis] for axis, number in at.items())

    def tile(self, one: StreamPass, at: Coordinates) -> TileFunction:
        """A tile as a function."""
        return TileFunction(one, at, self.needs, self.totals.axes, self.before_random, self.device, self.blocks)

    def source(self, place: Place) -> Any:
        return self.inputs[str(place[0])] if isinstance(place[0], str) else self.kept[place]

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, one: StreamPass) -> None:
        """One pass without gradients: keeps values and measures totals."""
        sums: dict[tuple[TotalKey, Chunk], Tensor] = {}
        moments: dict[tuple[TotalKey, Chunk], list[tuple[Tensor, OwnMoments]]] = {}
        with torch.no_grad():
            for at in self._told(one, "forward"):
                given = self.given(one, at)
                made = self.compute(self.tile(one, at), given)
                self._keep(one, at, given, made)
                self.collect(at, made, sums, moments)
        self.settle(sums, moments)

    def _keep(self, one: StreamPass, at: Coordinates, given: TileGiven, made: TileMade) -> None:
        """Write down, or hand on, the values that a tile made."""
        values = self.needs.graph.values
        for place, local in made.kept.items():
            box = self.needs.kept_box(one, place, at)
            if self.deliver is not None and place in self.results:
                boxes = {p: self.needs.window(one, p, at) or () for p in given.windows}
                own = Tensor.detach if self.memory is None else Tensor.clone  # memory of the host's rows is used again
                windows = {p: as_tile(values[p], boxes[p], own(window)) for p, window in given.windows.items()}
                self.deliver(as_tile(values[place], box, own(local)), windows)
            if self.deliver is None or place not in self.results or place in self.read_again:
                self.store(place).write(box, local)

    def collect(self, at: Coordinates, made: TileMade, sums: Any, moments: Any) -> None:
        """Add up what a tile measured."""
        for key, part in made.sums.items():
            where = (key, chunk_of(self.totals.axes[key], at))
            sums[where] = part if where not in sums else sums[where] + part
        for key, part in made.moments.items():
            moments.setdefault((key, chunk_of(self.totals.axes[key], at)), []).append((part, made.norms[key]))

    def store(self, place: Place) -> KeptTensor | HostTensor:
        if place not in self.kept:
            value, box = self.needs.graph.values[place], self.needs.region_box(place)
            at_host = self.memory is not None and place in self.host
            readers = sum(place in one.reads for one in self.passes.passes)
            self.kept[place] = (
                HostTensor(box, value.axes, self.memory, readers)
                if at_host and self.memory is not None
                else KeptTensor(box, readers)
            )
        return self.kept[place]

    def settle(self, sums: Any, moments: Any) -> None:
        """Make totals of what the tiles of all ranks measured."""
        for (key, chunk), value in sorted(sums.items(), key=in_order):
            self.totals.values[key, chunk] = self.totals.over_ranks(key, value).sum(0)
            if carries(value.dtype) and self._depends(key):
                self.totals.differentiable.add(key)
        for (key, chunk), parts in sorted(moments.items(), key=in_order):
            own = parts[0][1]
            mine = own.merged(torch.stack([moments for moments, _ in parts]))
            whole = own.merged(self.totals.over_ranks(key, mine))
            statistics = torch.stack([whole[1], whole[2] / whole[0].clamp(min=1)])
            self.totals.values[key, chunk] = statistics
            if self._depends(key):
                self.totals.differentiable.add(key)
            self.learned.append((key, own, statistics))

    def learn(self) -> None:
        """Update the running buffers of norms, in the order of their calls: a norm may be called several times.

        One in a checkpoint of the model learns the same again in backward.
        """
        for key, own, statistics in sorted(self.learned, key=lambda item: item[0]):
            for _ in range(1 + self.passes.graph.calls[key[0]].node.repeated):
                own.learn(statistics)
        self.learned.clear()

    def _depends(self, key: TotalKey) -> bool:
        """Whether a total has a gradient to pass on."""
        return any(p in self.graded for p in self.passes.graph.calls[key[0]].node.reads)

    def _told(self, one: StreamPass, name: str) -> Iterator[Coordinates]:
        """The tiles of a sweep."""
        tiles = begin_sweep(self, Sweep(one, name))
        for done, at in enumerate(tiles, 1):
            yield at
            self._keep_up()
            if self._has_time():
                self.do_meanwhile()
            if self.progress is not None:
                self.progress(done, len(tiles), f"pass {one.number} {name}")

    def _has_time(self) -> bool:
        """Whether the device has enough to do, or has to wait for its bands; or norms learn at once, as in passes on
        whole tensors.
        """
        crowded = self.memory is not None and self.memory.bands.crowded
        busy = not self.host and (self.device.type != "cuda" or len(self.queued) == QUEUED)
        return crowded or busy or any(one.whole for one in self.passes.passes)

    def do_meanwhile(self) -> None:
        """Do what was to be done meanwhile, if it was not yet."""
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()

    def _keep_up(self) -> None:
        """Wait until the GPU is done with all tiles but the last ones: queued work holds the windows of its tiles."""
        if self.memory is not None:
            self.memory.end_tile()
        if self.device.type == "cuda":
            self.queued.append(torch.cuda.current_stream(self.device).record_event())
            if len(self.queued) > (QUEUED_BANDS if self.host else QUEUED):
                self.queued.popleft().synchronize()
        if self.memory is not None:
            self.memory.look_ahead()

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, one: StreamPass) -> None:
        """One pass with gradients: from those of what it made to those of what it read."""
        self.complete(one)
        self._back(one, "backward")

    def backward_of_both(self, join: Join) -> None:
        """Two passes with gradients in two sweeps: first those of what the first one measured, then all others."""
        self.complete(join.after)
        self._back(join.after, "adjoints", join.before.measures)
        self.backward_joined(join)

    def backward_joined(self, join: Join) -> None:
        """All gradients of two passes, once those of what the first one measured are there."""
        self.complete(join.before)
        self.end_backward(join.before)  # it reads nothing more
        self._back(join.both, "backward")

    def _back(self, one: StreamPass, name: str, of: Collection[TotalKey] | None = None) -> None:
        """A sweep with all gradients, or with those of some totals."""
        for at in self._told(one, name):
            given = self.given(one, at, True, of)
            if given.wanted and (given.grads or given.adjoints):
                self.add_gradients(one, at, self.compute(self.tile(one, at), given))

    def end_backward(self, one: StreamPass) -> None:
        """The gradients of what a pass read are complete, as far as it goes; what it made is no longer needed."""
        for place in one.reads:
            if place in self.kept:
                self.kept[place].end_pass()
        for place in one.keeps:
            if place in self.kept:
                self.kept[place].drop()

    def release(self) -> None:
        """Give all memory back, and forget who takes part."""
        for kept in self.kept.values():
            kept.drop()
        self.kept.clear()
        if self.memory is not None:
            self.memory.end()
        self.sums.clear()
        self.deliver = self.meanwhile = None

    def complete(self, one: StreamPass) -> None:
        """Add up the gradients of a pass's totals over the ranks."""
        totals = self.totals
        for key, chunk in [k for k in totals.values if k[0] in one.measures and k[0] in totals.differentiable]:
            found = totals.adjoints.get((key, chunk))
            shared = any(self.mesh.size(axis) > 1 for axis in totals.axes[key])
            if found is None and shared:  # other ranks may have found one
                found = torch.zeros_like(totals.values[key, chunk])
            if found is not None:
                totals.adjoints[key, chunk] = totals.over_ranks(key, found).sum(0)

    def add_gradients(self, one: StreamPass, at: Coordinates, made: TileMade) -> None:
        """Add what one tile contributes to all gradients."""
        for place, grad in made.of_windows.items():
            self.source(place).add_gradient(self.needs.window(one, place, at), grad)
        self.sums.note(made.added)
        for (key, chunk), grad in made.of_known.items():
            self.totals.add_adjoint(key, chunk, grad)

    def parameters_of(self, one: StreamPass) -> dict[str, Tensor]:
        """The parameters that a pass reads and that have a gradient."""
        return {n: self.held[n] for n in one.names if n in self.held and self.held[n].requires_grad}
