"""One batch of a streamed model: its inputs by windows, and the grid of its tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.engine.inputs import Image, all_readable, check_scaled, converted
from mural.engine.memory_room import HOST_SHARE, MOST_DECODED, room_for_bands
from mural.engine.recompute import chosen
from mural.engine.stream_program import Given, Objective, check_stream
from mural.engine.stream_report import predicted_step
from mural.engine.streamed_results import StreamedResults
from mural.engine.tile_inputs import PieceInput, SourceInput, TensorInput, as_stored, formed, memory_format
from mural.engine.tile_sizes import tile_grids
from mural.errors import LayoutError
from mural.geometry import Cuts
from mural.graph.nodes import Place
from mural.memory.decoded_cache import DecodedCache
from mural.memory.pinned import settled
from mural.memory.random_states import RandomStates
from mural.memory.readable import Readable
from mural.memory.stream import Streamer
from mural.ranks import SPATIAL
from mural.shard import ShardedTensor
from mural.shard.generators import seed_generators
from mural.shard.relayout import pull
from mural.shard.unread import Unread

if TYPE_CHECKING:
    from mural.engine.streamed import Streamed

Part = Tensor | Readable | list[Readable]


class StreamedBatch:
    """One batch: its inputs by windows, the grid of its tiles, and the streamer that goes through them."""

    def __init__(self, way: Streamed, image: Image, target: Any, kind: str, delivered: bool = False):
        held = way.held
        self.way, self.held, self.mesh, self.device = way, held, way.mesh, held.device
        self.has_loss = kind != "result"
        parts: list[Any] = list(cast("tuple[Any, ...]", image)) if several(image) else [image]
        self.images = len(parts)
        leaves, form = pytree.tree_flatten(target, is_leaf=all_readable) if kind != "result" else ([], None)
        if any(not isinstance(leaf, Tensor) and not all_readable(leaf) for leaf in leaves):
            raise LayoutError("a streamed step takes tensors and sources as targets, alone or in tuples, lists, dicts")
        objective = Objective(
            held.plain, held.loss_terms.root, self.images, held.loss if kind != "result" else None, form
        )
        objective.both = kind == "both"
        self.parts = [*map(settled_part, parts), *map(settled_part, leaves)]
        objective.wanted = tuple(isinstance(part, Tensor) and part.requires_grad for part in self.parts)
        given = [self._given(part, number) for number, part in enumerate(self.parts)]
        check_stream(way.plan.stream or (), given[0][0])
        self.program, known = way.program(objective, given, kind, delivered)
        self.cuts = self._cuts(given[0][0])
        self.grid, grids = tile_grids(self.program, given[0][0], way.plan.stream or (), self.cuts, self.mesh)
        self.needs = self.program.needs_of(self.grid, grids)
        share = (1 - HOST_SHARE) / 2 if self.program.kept.host else MOST_DECODED
        decoded = way.free_host() * share if len(self.program.passes.passes) > 1 else 0
        self.cache = DecodedCache(int(decoded))
        self.inputs = {
            name: self._input(part, name, number)
            for number, (name, part) in enumerate(zip(self.program.names, self.parts, strict=True))
        }
        self.parameters = dict(objective.named_parameters())
        tensors = {n: p.detach().requires_grad_(p.requires_grad) for n, p in self.parameters.items()}  # without hooks
        tensors |= dict(objective.named_buffers())
        tensors |= {name: t.to(self.device) for name, t in self.program.constants.items()}
        seed_generators(held.draw(), self.device)
        states = RandomStates(self.program.tiles, tensors, self.device)
        self.streamer = Streamer(
            self.program.passes, self.needs, self.inputs, tensors, self.mesh, self.cuts, self.device, states,
            held.progress,
        )  # fmt: skip
        self.streamer.blocks = self._blocks()
        recorded = self.program.recorded
        recorded.graphs, recorded.unsettled = way.graphs(self.program), 0
        self.streamer.compute, self.streamer.guesses = recorded.run, recorded.guesses
        if recorded.graphs is not None:
            self.streamer.sums.lasting = recorded.graphs.sums
        if self.program.kept.host:
            self._keep_on_host(int(decoded))
        if known:
            self.streamer.meanwhile = lambda: way.verify(objective, given, self.program)

    def _keep_on_host(self, most: int) -> None:
        """Have values kept on the host; and what is read from sources, up to so many bytes of each."""
        self._settle_bands()
        memory = self.way.host_memory(self.program.kept.bands)
        self.streamer.host, self.streamer.memory = self.program.kept.host, memory
        alone = all(self.mesh.size(axis) == 1 for axis in SPATIAL)  # then all passes read all rows
        for given in self.inputs.values():
            if alone and isinstance(given, SourceInput):
                given.keep_in(memory, most)

    def _settle_bands(self) -> None:
        """Reckon, once for a program with a loss, what is left on the device for what passes to the host and back."""
        program, limit = self.program, self.way.limit()
        if program.settled or limit is None or not self.has_loss:
            return
        program.settled, predicted = True, predicted_step(self)
        if predicted is not None:
            rest = predicted.peak.bytes - program.kept.bands
            program.kept = replace(program.kept, bands=room_for_bands(limit, rest))

    @property
    def results(self) -> StreamedResults:
        """What becomes of what the model gives."""
        return StreamedResults(self)

    # -- inputs --------------------------------------------------------------------------------------------------------

    @property
    def _kind(self) -> torch.dtype:
        return next((p.dtype for p in self.held.plain.parameters() if p.is_floating_point()), torch.float32)

    def _given(self, part: Part, number: int) -> Given:
        """Shape and type of an input, as the model takes it."""
        if isinstance(part, Tensor):
            return tuple(part.shape), part.dtype
        sources = sources_of(part)
        shapes = sorted({tuple(s.shape) for s in sources})
        if len(shapes) != 1:
            raise LayoutError(f"the sources of one batch have shapes {shapes}: they have to be equal")
        if number < self.images:
            return (len(sources), *shapes[0]), self._kind
        flat, dtype = self._mask(sources[0])
        return (len(sources), *shapes[0][flat:]), dtype

    def _mask(self, source: Readable) -> tuple[int, torch.dtype]:
        """Whether a mask loses its channel dim, and its type."""
        dtype = getattr(source, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            dtype = source.read([(0, 1) for _ in source.shape]).dtype
        flat = source.shape[0] == 1 and bool(getattr(source, "flat", not dtype.is_floating_point))
        return int(flat), torch.int64 if flat and not dtype.is_floating_point else self._kind

    def _input(self, part: Part, name: str, number: int) -> Any:
        form = memory_format(self.held.plain)
        place: Place = (name, 0)
        if isinstance(part, ShardedTensor):
            wants, moved, box = self.needs.wants(place), part.to(self.device), self.needs.region_box(place)
            return PieceInput(part, lambda: pull(cast("ShardedTensor", moved), wants, "a margin of tiles"), box)
        if isinstance(part, Tensor):
            return TensorInput(part, self.device, form)
        sources = sources_of(part)
        mask = number >= self.images
        flat, dtype = self._mask(sources[0]) if mask else (0, self._kind)
        here = self.cuts["data"].interval(self.mesh.coordinates["data"])
        chosen = [converted(s, self._kind) if not mask else s for s in sources[here.start : here.stop]]
        if not mask and isinstance(getattr(chosen[0] if chosen else None, "dtype", None), torch.dtype):
            check_scaled(chosen[0], chosen[0].dtype)  # type: ignore[attr-defined]

        stored, values = as_stored(chosen)

        def convert(window: Tensor) -> Tensor:
            window = values(window)
            return formed((window[:, 0] if flat else window).to(dtype), form)

        memory = self.way.memory()
        return SourceInput(
            stored, here.start, settled(self.device), convert, self.cache, memory, 2 - flat, sources[0].shape[0]
        )

    # -- places --------------------------------------------------------------------------------------------------------

    def _cuts(self, image: tuple[int, ...]) -> dict[str, Cuts]:
        """How ranks share the image, along each axis."""
        first = self.parts[0]
        mesh, found = self.mesh, {"data": Cuts.even(image[0], self.mesh.size("data"))}
        align = self.held.inputs.align(image)
        for axis, extent in zip(SPATIAL, image[2:], strict=False):
            found[axis] = Cuts.even(extent, mesh.size(axis), align)
        if isinstance(first, ShardedTensor):
            axes = zip(first.placement.axes, first.placement.cuts, strict=True)
            found |= {a: c for a, c in axes if a is not None and c is not None}
        return found

    def _blocks(self) -> dict[int, str]:
        """The block of each call that the plan computes again in backward."""
        names = {id(module): name for name, module in self.held.plain.named_modules()}
        wanted = self.way.plan.recompute
        found = [f"model.{names[id(m)]}" for m in (chosen(self.held.plain, wanted) if wanted else ())]
        inside = ((c.node, n) for c in self.program.tiles.calls for n in found)
        return {node.id: n for node, n in inside if node.module == n or node.module.startswith(f"{n}.")}

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Give the inputs their gradients. Collective."""
        for given in self.inputs.values():
            given.finish(self.mesh)

    def close(self) -> None:
        """Give all memory back, and end the threads that read."""
        for given in getattr(self, "inputs", {}).values():
            if isinstance(given, SourceInput):
                given.release()
        if hasattr(self, "streamer"):
            self.program.recorded.steady.begin(None)
            self.streamer.release()


def several(image: Image) -> bool:
    """Whether a tuple of tensors was given: several inputs of the model."""
    return isinstance(image, tuple) and any(isinstance(part, Tensor) for part in image)


def settled_part(part: Any) -> Any:
    """An input that was not read yet is read now."""
    return part.tensor() if isinstance(part, Unread) else part


def sources_of(part: Any) -> list[Readable]:
    """The sources of a batch."""
    if not all_readable(part):
        raise LayoutError(f"a step takes a tensor, a sharded tensor or sources, not {type(part).__name__}")
    return list(part) if isinstance(part, (tuple, list)) else [part]
