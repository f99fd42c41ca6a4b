"""Sweeps: all tiles of one pass, forward or backward, with what they read, keep and add up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mural.geometry import Box, Cuts, Interval
from mural.graph.nodes import Place
from mural.memory.host_rows import HostMemory, HostTensor
from mural.memory.kept_tensors import KeptTensor
from mural.memory.passes import Passes, StreamPass, TotalKey
from mural.memory.tile_needs import Needs
from mural.memory.tile_task import Chunk, Coordinates, TileInput, TileTask, box_of
from mural.memory.tile_totals import Totals, in_order
from mural.ranks import Mesh
from mural.shard.tensor import ShardedTensor
from mural.shard.tiles import OwnMoments, tile_of

Progress = Callable[[int, int, str], None]


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
        self.deliver: Callable[[ShardedTensor, Mapping[Place, Any]], None] | None = None
        """Takes the tiles of the model's results, with what was read for them; they are not kept then."""
        self.read_again = {place for one in passes.passes for place in one.reads}
        self.blocks: Mapping[int, str] = {}
        """The block of each call that is computed again in backward."""
        self.meanwhile: Callable[[], None] | None = None
        """What there is to do while the first tile is computed."""
        self.gradients: dict[str, Tensor] = {}
        """The gradients of parameters, of this rank's tiles."""
        self.shared: dict[str, Tensor] = {}
        """The gradients of parameters that every rank finds as a whole."""
        self.learned: list[tuple[TotalKey, OwnMoments, Tensor]] = []
        """Statistics that norms have yet to learn."""
        self.graded = graded(passes, inputs, held)

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def tiles(self, one: StreamPass) -> list[Coordinates]:
        """This rank's tiles of a pass, in their fixed order; image by image where it reads no image dims."""
        values, grid = self.needs.graph.values, self.needs.grid_of(one)
        spatial = any(values[p].tiled for p in (*one.reads, *one.keeps))
        axes = [a for a in grid.cuts if spatial or a == "data"]
        return [dict(zip(axes, at, strict=True)) for at in product(*(grid.coordinates(a) for a in axes))]

    def task(self, one: StreamPass, at: Coordinates, grad: bool) -> tuple[TileTask, dict[Place, Tensor]]:
        """A tile with its windows read; the leaves are those whose gradient is wanted."""
        leaves: dict[Place, Tensor] = {}
        given: dict[Place, Tensor] = {}
        written = {s for call in one.calls for s in call.node.writes}
        for place in one.reads:
            value = self.needs.graph.values[place]
            box = self.window(one, place, at)
            if box is None:
                continue
            local = self.source(place).read(box)
            if grad and place in self.graded:
                local = leaves[place] = local.detach().requires_grad_()
                if place[0] in written:
                    local = local.clone()
            elif place[0] in written:
                local = local.clone()
            found = {a: i for a, i in zip(value.axes, box, strict=False) if a is not None}
            given[place] = tile_of(local, value.shape, value.axes, found, value.folds) if found else local
        known = self._known(one, grad)
        task = TileTask(
            one, at, self.needs, given, self.held, known, self.totals.axes, self.before_random, self.device, self.blocks
        )
        return task, leaves

    def window(self, one: StreamPass, place: Place, at: Coordinates) -> Box | None:
        """What a tile reads of a value; None for nothing."""
        value = self.needs.graph.values[place]
        spans: dict[str, Interval] = {}
        for axis in value.extents:
            found = self.needs.along(one, axis, at[axis]).values.get(place) if axis in at else None
            if found is None:
                return None
            spans[axis] = found
        return box_of(value, spans)

    def source(self, place: Place) -> Any:
        return self.inputs[str(place[0])] if isinstance(place[0], str) else self.kept[place]

    def _known(self, one: StreamPass, grad: bool) -> dict[tuple[TotalKey, Chunk], Tensor]:
        if not grad:
            return self.totals.values
        return {
            key: value.detach().requires_grad_() if key[0] in self.totals.differentiable else value
            for key, value in self.totals.values.items()
        }

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, one: StreamPass) -> None:
        """One pass without gradients: keeps values and measures totals."""
        sums: dict[tuple[TotalKey, Chunk], Tensor] = {}
        moments: dict[tuple[TotalKey, Chunk], list[tuple[Tensor, OwnMoments]]] = {}
        with torch.no_grad():
            for at in self._told(one, "forward"):
                task, _ = self.task(one, at, grad=False)
                task.run()
                self.collect(one, task, sums, moments)
        self.settle(sums, moments)

    def collect(self, one: StreamPass, task: TileTask, sums: Any, moments: Any) -> None:
        """Take what a tile made."""
        for place, tile in task.kept.items():
            if self.deliver is not None and place in self.results:
                self.deliver(tile, task.given)
            if self.deliver is None or place not in self.results or place in self.read_again:
                self.store(place).write(tile.box, tile.local.detach())
        for key, part in task.sums.items():
            at = (key, task.chunk(key))
            sums[at] = part.detach() if at not in sums else sums[at] + part.detach()
        for key, own in task.moments.items():
            moments.setdefault((key, task.chunk(key)), []).append((own.moments(), own.without_values()))

    def store(self, place: Place) -> KeptTensor | HostTensor:
        if place not in self.kept:
            value = self.needs.graph.values[place]
            spans = {a: self.needs.region(place, a) for a in value.extents}
            box = box_of(value, spans)
            at_host = self.memory is not None and place in self.host
            self.kept[place] = (
                HostTensor(box, value.axes, self.memory)
                if at_host and self.memory is not None
                else KeptTensor(box, value.axes, self.device)
            )
        return self.kept[place]

    def settle(self, sums: Any, moments: Any) -> None:
        """Make totals of what the tiles of all ranks measured."""
        for (key, chunk), value in sorted(sums.items(), key=in_order):
            self.totals.values[key, chunk] = self.totals.over_ranks(key, value).sum(0)
            if value.is_floating_point() and self._depends(key):
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
        """Update the running buffers of norms, in the order of their calls: a norm may be called several times."""
        for _, own, statistics in sorted(self.learned, key=lambda item: item[0]):
            own.learn(statistics)
        self.learned.clear()

    def _depends(self, key: TotalKey) -> bool:
        """Whether a total has a gradient to pass on."""
        return any(p in self.graded for p in self.passes.graph.calls[key[0]].node.reads)

    def _told(self, one: StreamPass, name: str) -> Iterator[Coordinates]:
        tiles = self.tiles(one)
        for place in one.reads:
            self.source(place).plan([box for at in tiles if (box := self.window(one, place, at)) is not None])
        for done, at in enumerate(tiles, 1):
            yield at
            self._do_meanwhile()
            self._keep_up()
            if self.progress is not None:
                self.progress(done, len(tiles), f"pass {one.number} {name}")

    def _do_meanwhile(self) -> None:
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()

    def _keep_up(self) -> None:
        """Wait until the GPU is done with all tiles before the last one: queued work holds the memory of its tiles."""
        if self.device.type == "cuda":
            self.queued.append(torch.cuda.current_stream(self.device).record_event())
            if len(self.queued) > 1:
                self.queued.popleft().synchronize()

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, one: StreamPass) -> None:
        """One pass with gradients: from those of what it made to those of what it read."""
        self._complete(one)
        for place in one.keeps:
            if place in self.kept:
                value, tiles = self.needs.graph.values[place], self.tiles(one)
                spans = [{a: self.needs.kept(one, place, a, at[a]) for a in value.extents} for at in tiles]
                self.kept[place].plan_gradient([box_of(value, each) for each in spans])
        for at in self._told(one, "backward"):
            task, leaves = self.task(one, at, grad=True)
            with torch.enable_grad():
                task.run()
            self.differentiate(one, task, leaves, self._roots(task))
        self.end_pass(one)
        for place in one.keeps:
            if place in self.kept:
                self.kept[place].drop()

    def end_pass(self, one: StreamPass) -> None:
        """The gradients of what a pass read are complete, as far as it goes."""
        for place in one.reads:
            if place in self.kept:
                self.kept[place].end_pass()

    def _complete(self, one: StreamPass) -> None:
        """Add up the gradients of a pass's totals over the ranks."""
        for key, chunk in [k for k in self.totals.adjoints if k[0] in one.measures]:
            found = self.totals.adjoints[key, chunk]
            self.totals.adjoints[key, chunk] = self.totals.over_ranks(key, found).sum(0)

    def _roots(self, task: TileTask) -> list[tuple[Tensor, Tensor]]:
        """Where backward begins in a tile: at what it kept, and at its parts of totals."""
        roots: list[tuple[Tensor, Tensor]] = []
        for place, tile in task.kept.items():
            grad = self.kept[place].gradient(tile.box) if place in self.kept else None  # a result that was delivered
            if grad is not None and tile.local.requires_grad:
                roots.append((tile.local, grad))
        for key, part in task.sums.items():
            adjoint = self.totals.adjoints.get((key, task.chunk(key)))
            if adjoint is not None and part.requires_grad:
                roots.append((part, adjoint))
        for key, own in task.moments.items():
            at = (key, task.chunk(key))
            if at in self.totals.adjoints and own.values.requires_grad:
                roots.append((own.values, own.gradient(self.totals.adjoints[at], self.totals.values[at])))
        return roots

    def differentiate(
        self, one: StreamPass, task: TileTask, leaves: Mapping[Place, Tensor], roots: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Add what one tile contributes to all gradients."""
        names = self.parameters_of(one)
        known = {k: v for k, v in task.known.items() if v.requires_grad and k[0] in one.uses}
        wanted = [*leaves.values(), *(self.held[n] for n in names), *known.values()]
        if not roots or not wanted:
            return
        tensors, grads = zip(*roots, strict=True)
        results: Iterator[Any] = iter(torch.autograd.grad(tensors, wanted, grads, allow_unused=True))
        for place, grad in zip(leaves, results, strict=False):
            if grad is not None:
                value = self.needs.graph.values[place]
                spans = {a: task.spans[a].values[place] for a in value.extents if a in task.spans}
                self.source(place).add_gradient(box_of(value, spans), grad)
        for name, grad in zip(names, results, strict=False):
            if grad is not None:
                held = self.gradients.get(name)
                self.gradients[name] = grad if held is None else held.add_(grad)
        for (key, chunk), grad in zip(known, results, strict=False):
            if grad is not None:
                self.totals.add_adjoint(key, chunk, grad)

    def parameters_of(self, one: StreamPass) -> list[str]:
        """The parameters that a pass reads and that have a gradient."""
        names = dict.fromkeys(str(p[0]) for call in one.calls for p in call.node.reads if isinstance(p[0], str))
        return [n for n in names if n in self.held and self.held[n].requires_grad]


def graded(passes: Passes, inputs: Mapping[str, TileInput], held: Mapping[str, Tensor]) -> set[Place]:
    """The tensors that have a gradient."""
    found: set[Place] = {(name, 0) for name, given in inputs.items() if given.wanted}
    found |= {(name, 0) for name, tensor in held.items() if tensor.requires_grad}
    for call in passes.graph.calls:
        if any(p in found for p in call.node.reads):
            found |= {p for p in call.node.makes if passes.graph.values[p].dtype.is_floating_point}
    return found
