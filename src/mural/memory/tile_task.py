"""A task: one tile of one pass, which runs the calls of the pass on its windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mural.errors import UnsupportedOp
from mural.geometry import Box, Interval, Reads
from mural.graph.nodes import Place
from mural.memory.passes import StreamPass, TotalKey
from mural.memory.tile_calls import TileCall, TileValue, as_in_model, made_by
from mural.memory.tile_needs import AxisNeeds, Needs
from mural.shard.autocasting import META_CASTS
from mural.shard.layout import Layout
from mural.shard.meta_autocast import meta_autocast
from mural.shard.tensor import ShardedTensor
from mural.shard.tiles import OwnMoments, Spans, cropped, tile_of, tile_run

COPYING = ("cat", "concat", "concatenate", "stack")
"""Calls that copy what they read, whatever its strides."""
Coordinates = Mapping[str, int]
"""Which tile it is along each axis."""
Chunk = int | None
"""The images that a total is of: a coordinate along the data axis, None for all."""


class TileInput(Protocol):
    """An input of the model that is read by windows."""

    wanted: bool
    """Whether its gradient is."""

    def plan(self, boxes: Sequence[Box]) -> None:
        """Learn which windows are read next, in order."""
        ...

    def read(self, box: Box) -> Tensor:
        """A window on the computing device."""
        ...

    def add_gradient(self, box: Box, grad: Tensor) -> None:
        """Add the gradient of a window."""
        ...

    def rescale(self, factor: Tensor) -> None:
        """Scale the gradient."""
        ...


class _MeasuredStop(Exception):
    """A norm has measured its part, and nobody needs its result."""


@dataclass(frozen=True)
class MeasuredElsewhere:
    """What a norm measures of what another tile holds as well, which measures it."""

    own: OwnMoments

    @property
    def values(self) -> Tensor:
        """The own part, without a gradient."""
        return self.own.values.detach()

    def moments(self) -> Tensor:
        """The moments of nothing."""
        return torch.zeros_like(self.own.moments())

    def merged(self, parts: Tensor) -> Tensor:
        """The moments of everything, from those of all tiles."""
        return self.own.merged(parts)

    def gradient(self, adjoint: Tensor, statistics: Tensor) -> Tensor:
        """No gradient."""
        return torch.zeros_like(self.own.values)

    def learn(self, statistics: Tensor) -> None:
        """Update running buffers."""
        self.own.learn(statistics)

    def without_values(self) -> OwnMoments:
        """The same, without the memory of the tile."""
        return self.own.without_values()


@dataclass
class TileTask:
    """One tile: the windows that it is given, what it makes, and the parts that it adds to totals.

    `given` are the windows by place; `held` the parameters, buffers and constants by name; `known` the totals.
    """

    one: StreamPass
    at: Coordinates
    needs: Needs
    given: Mapping[Place, Tensor]
    held: Mapping[str, Tensor]
    known: Mapping[tuple[TotalKey, Chunk], Tensor]
    axes_of_totals: dict[TotalKey, tuple[str, ...]]
    before_random: Callable[[int], None]
    device: torch.device
    blocks: Mapping[int, str] = field(default_factory=dict[int, str])
    """The block of each call that is computed again in backward."""
    kept: dict[Place, Tensor] = field(default_factory=dict[Place, Tensor])
    sums: dict[TotalKey, Tensor] = field(default_factory=dict[TotalKey, Tensor])
    moments: dict[TotalKey, OwnMoments] = field(default_factory=dict[TotalKey, OwnMoments])

    def __post_init__(self) -> None:
        self.spans: dict[str, AxisNeeds] = {a: self.needs.along(self.one, a, c) for a, c in self.at.items()}
        self.values: dict[Place, Any] = {}
        self.grid = self.needs.grid_of(self.one)
        self._call: TileCall | None = None
        self._windows = self._totals = 0

    # -- what the rules ask --------------------------------------------------------------------------------------------

    def out(self, layout: Layout, dims: Sequence[Reads], name: str) -> Spans:
        """The outputs that a windowed rule is to compute."""
        number, self._windows = self._windows, self._windows + 1
        node = self._running.node.id
        return {a: needs.windows[node][number] for a, needs in self.spans.items() if node in needs.windows}

    def own(self, layout: Layout) -> Box:
        """The positions of a tensor that belong to this tile alone."""
        grid = self.grid
        return tuple(
            interval if cuts is None or axis is None else grid.own(axis, extent, self.at[axis])
            for axis, cuts, extent, interval in zip(layout.axes, layout.cuts, layout.shape, layout.box, strict=True)
        )

    def total(self, part: Tensor, axes: Sequence[str], name: str) -> Tensor:
        """The total, if it is known; otherwise this tile's part of it."""
        key, counts = self._next_total(axes)
        if key in self.one.measures:
            self.sums[key] = part if counts else torch.zeros_like(part).requires_grad_(part.requires_grad)
        found = self.known.get((key, self.chunk(key)))
        return part.detach() if found is None else found

    def statistics(self, own: Callable[[], OwnMoments], axes: Sequence[str]) -> Tensor:
        """The statistics of a norm, if they are known."""
        key, counts = self._next_total(axes)
        if key in self.one.measures:
            self.moments[key] = own() if counts else MeasuredElsewhere(own())
        found = self.known.get((key, self.chunk(key)))
        if found is None or key not in self.one.uses:
            raise _MeasuredStop
        return found

    def _next_total(self, axes: Sequence[str]) -> tuple[TotalKey, bool]:
        """The next total of the call, and whether this tile's part of it counts.

        Along an axis that does not cut what is added up, all tiles hold the same: the part of the first one counts.
        """
        call = self._running
        key = (call.node.id, self._totals)
        self._totals += 1
        uncut = self.needs.uncut(call)
        self.axes_of_totals[key] = (*axes, *uncut)
        return key, all(self.at.get(axis, self.grid.first[axis]) == 0 for axis in uncut)

    def chunk(self, key: TotalKey) -> Chunk:
        """The images that a total is of, for this tile."""
        return chunk_of(self.axes_of_totals[key], self.at)

    @property
    def _running(self) -> TileCall:
        if self._call is None:
            raise RuntimeError("no call runs")
        return self._call

    # -- calls ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all calls of the pass; blocks that are computed again in backward keep their inputs alone."""
        self.values.update(self.given)
        with tile_run(self):
            for calls, again in self.one.groups(self.blocks):
                if again and torch.is_grad_enabled():
                    self._recomputed(calls)
                    continue
                for call in calls:
                    self._step(call, self.values)
                    self._forget(call)

    def _recomputed(self, calls: Sequence[TileCall]) -> None:
        """Run calls so that backward runs them again."""
        made = [p for c in calls for p in c.node.makes]
        given = {p: self.values[p] for c in calls for p in c.node.reads if p in self.values}
        results = [p for p in made if self.one.last_use.get(p, -1) > calls[-1].node.id]

        def forward() -> tuple[Any, ...]:
            values = dict(given)
            with tile_run(self):
                for call in calls:
                    self._step(call, values)
            return tuple(values[p] for p in results)

        lower = META_CASTS[-1]  # torch itself casts as in forward when it runs this again, but not what has no memory
        again = checkpoint(
            forward, use_reentrant=False, context_fn=lambda: (nullcontext(), meta_autocast(lower))
        )  # fmt: skip
        self.values.update(zip(results, again, strict=True))
        for call in calls:
            self._forget(call)

    def _step(self, call: TileCall, values: dict[Place, Any]) -> None:
        """Make one call."""
        self._call, self._windows, self._totals = call, 0, 0
        if call.random:
            self.before_random(call.node.id)
        node = call.node
        given = [self._argument(call, place, values) for place in node.reads]
        try:
            with as_in_model(node, self.device):
                result = call.run(given, self.device)
        except _MeasuredStop:
            return
        for place, tensor in made_by(node, result, given).items():
            if place[0] in self.one.written_first:
                tensor = writable(tensor)
            values[place] = tensor
            if place in self.one.keeps and not isinstance(tensor, ShardedTensor):
                self.kept[place] = tensor.clone() if place[0] in self.one.written else tensor
            elif place in self.one.keeps:
                axes = [a for a in self.needs.graph.values[place].extents if a in self.at]
                tile = self._unwritten(place, tensor)
                spans = {a: self.needs.kept(self.one, place, a, self.at[a]) for a in axes}
                self.kept[place] = cropped(tile, spans, dense=False)

    def _argument(self, call: TileCall, place: Place, values: Mapping[Place, Any]) -> Any:
        """A tensor as a call takes it: what it needs of it, and nothing of what its known totals replace."""
        if place not in values and place[0] in self.held:
            return self.held[str(place[0])]
        value = self.needs.graph.values[place]
        if call.levels and not call.norm:
            if call.node.id not in self.one.measured_calls:
                return self._nothing(value, place)
            x = values[place]
            return cropped(x, self._own_spans(value)) if isinstance(x, ShardedTensor) else x
        if place not in values:
            raise UnsupportedOp(
                f"{call.node.op} at {call.node.site!r} reads a value of shape {call.node.input_shapes[0]} that a pass "
                f"over tiles does not have: raise stream, or give the loss the model's results as they are"
            )
        x = values[place]
        if call.norm and call.node.id in self.one.measured_calls and isinstance(x, ShardedTensor):
            return self._unwritten(place, x)
        if call.windows or call.norm or not isinstance(x, ShardedTensor):
            return x
        return cropped(x, self._out_spans(call, value), place[0] in self.one.written, call.node.op not in COPYING)

    def _unwritten(self, place: Place, tile: ShardedTensor) -> ShardedTensor:
        """A tile that is looked at when all calls have been made: a copy, if one of them writes to it."""
        if place[0] not in self.one.written:
            return tile
        return ShardedTensor(tile.local.clone(), tile.placement, "", tile.folds)

    def _own_spans(self, value: TileValue) -> Spans:
        return {a: self.grid.own(a, n, self.at[a]) for a, n in value.extents.items() if a in self.at}

    def _out_spans(self, call: TileCall, value: TileValue) -> Spans:
        """What a pointwise call needs of an argument: what is needed of its results."""
        found: dict[str, Interval] = {}
        for axis in value.extents:
            needs = self.spans[axis].values if axis in self.spans else {}
            spans = [needs[p] for p in call.node.makes if p in needs and needs[p].size]
            if spans and all(axis in self.needs.graph.values[p].extents for p in call.node.makes):
                found[axis] = Interval(min(s.start for s in spans), max(s.stop for s in spans))
        return found

    def _nothing(self, value: TileValue, place: Place) -> Any:
        """A tile without positions of the image, for a call that only brings known totals together."""
        if not any(value.axes):
            found = self.values.get(place, self.held.get(str(place[0])))
            return (
                torch.zeros((), dtype=value.dtype, device=self.device).expand(value.shape) if found is None else found
            )
        spans = {a: Interval(0, 0) if a != "data" else self.grid.own(a, n, self.at[a])
                 for a, n in value.extents.items()}  # fmt: skip
        return empty_tile(value, spans, self.device)

    def _forget(self, call: TileCall) -> None:
        """Let go of what no later call reads."""
        for place in call.node.reads:
            if self.one.last_use[place] == call.node.id:
                self.values.pop(place, None)


def writable(tensor: Any) -> Any:
    """A tile that later calls may write to: a copy of one that autograd takes for a part of another tensor."""
    if not isinstance(tensor, ShardedTensor) or not torch.is_grad_enabled() or not tensor.local._is_view():
        return tensor
    return ShardedTensor(tensor.local.clone(), tensor.placement, tensor.aliased, tensor.folds)


def empty_tile(value: TileValue, spans: Spans, device: torch.device) -> ShardedTensor:
    """A tile of zeros."""
    shape = [spans[a].size if a is not None else n for a, n in zip(value.axes, value.shape, strict=True)]
    return tile_of(torch.zeros(shape, dtype=value.dtype, device=device), value.shape, value.axes, spans, value.folds)


def chunk_of(axes: Sequence[str], at: Coordinates) -> Chunk:
    """The images that a total over these axes is of, for a tile."""
    return None if "data" in axes else at.get("data")
