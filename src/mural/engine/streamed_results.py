"""What becomes of a streamed model's results: joined, or given to sinks and observers tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.engine.opened_results import closed
from mural.engine.result_tiles import ResultSink, ResultTile
from mural.errors import LayoutError, PlanError
from mural.geometry import Interval
from mural.geometry import slices as slices_in
from mural.graph.nodes import Place
from mural.graph.sites import At
from mural.memory.tile_calls import TileValue
from mural.shard import ShardedTensor
from mural.shard.layout import Layout

if TYPE_CHECKING:
    from mural.engine.streamed_batch import StreamedBatch


@dataclass(frozen=True)
class StreamedResults:
    """The results of a batch."""

    batch: StreamedBatch

    def joined(self, plain: dict[Place, Tensor]) -> Any:
        """The results as the model gives them: sharded where they have the image's dims."""
        outputs = self.batch.program.graph.calls[0].outputs
        return closed(pytree.tree_map_only(At, lambda at: self.result((at.source, at.pick), plain), outputs))

    def result(self, place: Place, plain: dict[Place, Tensor]) -> Tensor:
        """One of the results, from those that are no tiles or from what passes kept."""
        facts, source = self.batch.program.tiles.values[place], str(place[0])
        if place in plain:
            found, none = plain[place], (None,) * len(facts.shape)
            if not isinstance(found, ShardedTensor):
                return found
            return ShardedTensor(found.local, Layout(self.batch.mesh, facts.shape, none, none, ()), "", found.folds)
        if source in self.batch.streamer.held:  # the model returns a parameter as it is
            return self.batch.streamer.held[source].detach()
        read = (
            self.batch.inputs[source].at_once if source in self.batch.inputs else self.batch.streamer.kept[place].copied
        )
        if not any(facts.axes):
            return read(self.batch.needs.region_box(place))
        dims = zip(facts.axes, facts.shape, strict=True)
        cuts = tuple(None if a is None else self.batch.cuts[a].scaled(n) for a, n in dims)
        layout = Layout(self.batch.mesh, facts.shape, facts.axes, cuts, tuple(sorted(self.batch.cuts.items())))
        return ShardedTensor(read(layout.box), layout, "", facts.folds)

    def single(self, instead: str) -> TileValue:
        """The model's result, which has to be one tensor with the image's dims."""
        found = [p for p in self.batch.streamer.results if any(self.batch.program.tiles.values[p].axes)]
        if len(found) != 1:
            raise PlanError(f"the model gives {len(found)} results in tiles, but a sink takes one: {instead}")
        return self.batch.program.tiles.values[found[0]]

    def into(self, into: Any) -> Callable[..., None]:
        """Gives tiles of the result to one sink of results, or writes them into a sink for each image."""
        return self.teller(into, "leave into= out") if isinstance(into, ResultSink) else self.writer(into)

    def writer(self, into: Any) -> Callable[..., None]:
        """Writes tiles of the result into a sink for each image."""
        sinks = list(into) if isinstance(into, (list, tuple)) else [into]
        shape = self.single("leave into= out").shape
        if len(sinks) != shape[0] or any(tuple(s.shape) != shape[1:] for s in sinks):
            raise LayoutError(
                f"{len(sinks)} sinks of shape {[tuple(s.shape) for s in sinks]} for a result of shape {shape}: give "
                f"one for each image, of shape {shape[1:]}"
            )

        def write(tile: ShardedTensor, given: Mapping[Place, Any]) -> None:
            for row, number in enumerate(range(*tile.box[0])):
                kind = getattr(sinks[number], "dtype", None)
                values = tile.local[row].to(kind) if isinstance(kind, torch.dtype) else tile.local[row]
                sinks[number].write([tuple(i) for i in tile.box[1:]], values)

        return write

    def teller(self, sink: ResultSink, instead: str) -> Callable[..., None]:
        """Gives tiles of the result, with their part of the target, to a sink. Collective."""
        facts = self.single(instead)
        sink.begin(facts.shape, facts.dtype)
        names = self.batch.program.names[self.batch.images :]

        def tell(tile: ShardedTensor, given: Mapping[Place, Any]) -> None:
            sink.take(ResultTile(tile.local, self._target_piece(names, tile.placement, given), tile.box))

        return tell

    def observer(self, observe: Callable[[Any], None]) -> Callable[..., None]:
        """Shows tiles of the result to whoever observes steps."""
        self.single("observe models with one")
        return lambda tile, _: observe(ResultTile(tile.local.detach(), None, tile.box))

    def _target_piece(self, names: Sequence[str], result: Layout, given: Mapping[Place, Any]) -> Tensor | None:
        """What a single target has at the place of a result; None where their extents differ."""
        if len(names) != 1:
            return None
        place, box = (names[0], 0), result.box
        shape = self.batch.program.tiles.values[place].shape
        dims = len(box) - 2 if len(shape) > 1 else 0
        lead = len(shape) - dims
        if lead < 1 or shape[lead:] != result.shape[2 : 2 + dims]:
            return None
        spans = (box[0], *(Interval(0, n) for n in shape[1:lead]), *box[2 : 2 + dims])
        found = given.get(place)
        if isinstance(found, ShardedTensor) and all(h.contains(s) for h, s in zip(found.box, spans, strict=True)):
            return found.local[slices_in(spans, found.box)]
        return self.batch.inputs[names[0]].at_once(spans)  # a pass that gives results need not read the target
