"""A batch through a model in tiles that follow each other: one device, any image."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.comm.failure.shared_fate import shared_fate
from mural.engine.held_model import HeldModel
from mural.engine.inputs import Image, Needs, all_readable, check_filled, check_scaled, converted
from mural.engine.recompute import chosen
from mural.engine.result_tiles import ResultSink, ResultTile
from mural.engine.stream_program import Given, Objective, StreamProgram, check_stream, same_calls, stream_program
from mural.engine.stream_report import PredictedStep, memory_limit, predicted_step
from mural.engine.tile_inputs import PieceInput, SourceInput, TensorInput, formed
from mural.errors import LayoutError, PlanError
from mural.geometry import Box, Cuts
from mural.geometry import slices as slices_in
from mural.graph import capture
from mural.graph.nodes import Place
from mural.graph.sites import At
from mural.memory.choice import Room, Speeds, pass_weight
from mural.memory.decoded_cache import DecodedCache
from mural.memory.host_rows import HostMemory
from mural.memory.pinned import Buffers, settled
from mural.memory.readable import Readable
from mural.memory.stream import Streamer
from mural.memory.tile_calls import CallForm, tensors_in
from mural.memory.tile_needs import Needs as TileNeeds
from mural.memory.tile_needs import TileGrid, grid_of
from mural.memory.tile_task import box_of
from mural.plans import bytes_of
from mural.ranks import SPATIAL
from mural.shard import ShardedTensor
from mural.shard.generators import generators_kept, seed_generators
from mural.shard.layout import Layout
from mural.shard.ops.random.lattice import new_key
from mural.shard.relayout import pull
from mural.shard.unread import Unread

DEVICE_SHARE, HOST_SHARE = 0.3, 0.7
"""The part of the device's memory, and of the host's free memory, that kept values may take."""
MOST_TIMES = 8.0
"""How many times as large the tiles of a pass may be that makes little of them."""
LEAST_BANDS = 16
"""How many bands a pass has at least, unless tiles are larger: the first one travels while nothing computes."""
MOST_DECODED = 0.25
"""The part of the host's free memory that decoded pixels may take for later passes."""
Part = Tensor | Readable | list[Readable]


class Streamed:
    """Steps, inference and evaluation of a model that sees an image in tiles."""

    spans = ()

    def __init__(self, held: HeldModel):
        self.held, self.plan, self.transport = held, held.plan, held.world_mesh.transport
        self.mesh = held.mesh
        self.programs: dict[Any, StreamProgram] = {}
        self.buffers: Buffers | None = None
        self.hosted: HostMemory | None = None
        self.keep: str | None = None
        self.changed: set[Any] = set()
        """Programs whose model makes other calls by now."""
        self.predicted: PredictedStep | None = None
        self.seconds: float | None = None
        """The last step: what is predicted for it, and the seconds that it took."""

    def verify(self, objective: Objective, given: Sequence[Given], program: StreamProgram) -> None:
        """Capture the model again, and raise if it makes other calls than the program; the GPU computes meanwhile."""
        graph = capture(objective, [shape for shape, _ in given], [dtype for _, dtype in given])
        if not same_calls(graph, program.graph):
            self.changed.add(self.key)
            raise _OtherCalls

    # -- calls ---------------------------------------------------------------------------------------------------------

    def step(self, image: Image, target: Any, reduce: bool, weight: float) -> Tensor:
        """The loss of the whole batch, on every rank, after forward and backward. Collective."""
        held = self.held

        def run(batch: StreamedBatch) -> Tensor:
            self.predicted = predicted_step(batch)
            loss = batch.streamer.step(weight)
            held.check_loss(loss)
            batch.finish()
            self._add_gradients(batch.streamer)
            self._effects(batch.streamer)
            return loss

        begin = time.perf_counter()
        with shared_fate(self.transport):
            held.same_inputs.check("step", image=image, target=target)
            check_filled(image)
            held.calls += 1
            with self._scope():
                loss = self._run(image, target, "loss", run)
            if reduce:
                with held.reducer.watching():
                    pass
            self.transport.await_gpu("the step")
            self.seconds = time.perf_counter() - begin
            return loss

    def report(self) -> dict[str, Any]:
        """What is predicted for the last step (peak of memory, seconds, bytes over the link), and its seconds."""
        return {} if self.predicted is None else self.predicted.report(self.seconds, memory_limit(self.held))

    def call(self, image: Image, into: Any = None) -> Any:
        """The model's result without gradients, sharded, or written into a sink for each image. Collective."""

        def run(batch: StreamedBatch) -> Any:
            if into is not None:
                batch.streamer.deliver = batch.writer(into)
            plain = self._infer(batch)
            return None if into is not None else batch.joined(plain)

        with shared_fate(self.transport), torch.no_grad(), self._scope():
            self.held.same_inputs.check("call", image=image)
            return self._run(image, None, "result", run)

    def evaluate(self, image: Image, target: Any) -> tuple[Any, Any, Tensor]:
        """The model's result, the target cut like it, and the loss of the whole batch; no gradients. Collective."""
        with shared_fate(self.transport), torch.no_grad(), self._scope():
            self.held.same_inputs.check("evaluate", image=image, target=target)
            loss, output = self._run(image, target, "both", lambda batch: batch.joined(self._infer(batch)))
            return output, self.held.inputs.target(target, image), loss

    def evaluate_into(self, image: Image, target: Any, sink: ResultSink) -> Tensor:
        """The loss of the whole batch, while the sink takes result and target tile by tile. Collective."""

        def run(batch: StreamedBatch) -> Tensor:
            batch.streamer.deliver = batch.teller(sink)
            return self._infer(batch)[batch.streamer.loss_place]

        with shared_fate(self.transport), torch.no_grad(), self._scope():
            self.held.same_inputs.check("evaluate", image=image, target=target)
            return self._run(image, target, "both", run)

    def needs(self, training: bool) -> Needs:
        """What this rank takes of every batch: sources, which it reads by windows."""
        return Needs(self.held.world_mesh, by_window=True)

    # -- parts ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _scope(self) -> Generator[None]:
        """What holds while the model runs: the precision of the plan."""
        device = self.held.device
        with ExitStack() as stack:
            stack.enter_context(generators_kept(device))
            if self.plan.precision == "bfloat16":
                stack.enter_context(torch.autocast(device.type, torch.bfloat16))
            yield

    def _run(self, image: Image, target: Any, kind: str, run: Callable[[StreamedBatch], Any]) -> Any:
        """What `run` gives for a batch; from the start, if the model is found to have changed at its first tile."""
        for _ in range(2):
            batch = StreamedBatch(self, image, target, kind)
            try:
                return run(batch)
            except _OtherCalls:
                continue
            finally:
                batch.close()
        raise PlanError("the model makes other calls each time that it is asked: it cannot be streamed")

    def program(self, objective: Objective, given: Sequence[Given], kind: str) -> StreamProgram:
        """The program for these inputs; the calls are captured each time, and compared with those known before."""
        modes = tuple(module.training for module in objective.model.modules())
        key = (tuple(given), kind, modes)
        self.key = key
        known = self.programs.get(key)
        if known is not None and key not in self.changed:
            return known
        self.changed.discard(key)
        tile = self.plan.stream or ()
        self.programs[key] = found = stream_program(objective, given, tile, self._room(given), self.keep)
        return found

    def _room(self, given: Sequence[Given]) -> Room:
        """The room for kept values."""
        device = self.held.device
        itemsize = 2 if self.plan.precision == "bfloat16" else 8
        if device.type != "cuda":
            return Room(None, 0, itemsize, Speeds(flops=1e11, memory=1e10))
        limit = bytes_of(self.plan.memory) if self.plan.memory else device_limit(device)
        return Room(int(limit * DEVICE_SHARE), int(free_memory() * HOST_SHARE), itemsize)

    def host_memory(self) -> HostMemory:
        """The host memory of kept values, from step to step."""
        if self.hosted is None:
            self.hosted = HostMemory(settled(self.held.device))
        return self.hosted

    def memory(self) -> Buffers:
        """The pinned memory that windows travel through, kept from step to step."""
        if self.buffers is None:
            self.buffers = Buffers(settled(self.held.device), keep=12)
        return self.buffers

    def _add_gradients(self, streamer: Streamer) -> None:
        """Add what the tiles found to the parameters' gradients, scaled so that their mean over the ranks is true."""
        replicas = self.mesh.replicas
        with torch.no_grad():
            for name in {**streamer.gradients, **streamer.shared}:
                found = [g * replicas if replicas > 1 else g for g in (streamer.gradients.get(name),) if g is not None]
                found += [streamer.shared[name]] if name in streamer.shared else []
                parameter, total = streamer.held[name], sum(found[1:], found[0])
                parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)

    def _infer(self, batch: StreamedBatch) -> dict[Place, Tensor]:
        """The results that are no tiles; as in torch, norms in training mode learn."""
        found = batch.streamer.infer()
        self._effects(batch.streamer)
        return found

    def _effects(self, streamer: Streamer) -> None:
        """What a forward does next to its results, once: the counting of batches."""
        made: dict[Place, Any] = {}
        with torch.no_grad():
            for _, node in streamer.passes.graph.graph.effects:
                given = [made[p] if p in made else streamer.held[str(p[0])] for p in node.reads]
                result = CallForm.of(node).call(given, streamer.device)
                made.update(zip(node.makes, tensors_in(result) or [given[i] for i in node.returns], strict=True))


class _OtherCalls(Exception):
    """The model makes other calls than the program that runs."""


class StreamedBatch:
    """One batch: its inputs by windows, the grid of its tiles, and the streamer that goes through them."""

    def __init__(self, way: Streamed, image: Image, target: Any, kind: str):
        held = way.held
        self.way, self.held, self.mesh, self.device = way, held, way.mesh, held.device
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
        given = [self._given(part, number) for number, part in enumerate(self.parts)]
        check_stream(way.plan.stream or (), given[0][0])
        known = len(way.programs)
        self.program = way.program(objective, given, kind)
        self.cuts = self._cuts(given[0][0])
        self.grid, grids = self._grids(given[0][0])
        self.needs = TileNeeds(self.program.passes, self.grid, grids)
        self.cache = DecodedCache(0 if len(self.program.passes.passes) == 1 else int(free_memory() * MOST_DECODED))
        self.inputs = {
            name: self._input(part, name, number)
            for number, (name, part) in enumerate(zip(self.program.names, self.parts, strict=True))
        }
        tensors = {**dict(objective.named_parameters()), **dict(objective.named_buffers())}
        tensors |= {name: t.to(self.device) for name, t in self.program.graph.held.items()}
        self.streamer = Streamer(
            self.program.passes, self.needs, self.inputs, tensors, self.mesh, self.cuts, self.device,
            self._random_states(), held.progress,
        )  # fmt: skip
        self.streamer.blocks = self._blocks()
        if self.program.kept.host:
            self.streamer.host, self.streamer.memory = self.program.kept.host, way.host_memory()
        if len(way.programs) == known:
            self.streamer.meanwhile = lambda: way.verify(objective, given, self.program)

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
            value, wants, moved = self.program.tiles.values[place], self.needs.wants(place), part.to(self.device)
            box = box_of(value, {a: self.needs.region(place, a) for a in value.extents})
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

        def convert(window: Tensor) -> Tensor:
            return formed((window[:, 0] if flat else window).to(dtype), form)

        memory = self.way.memory()
        return SourceInput(chosen, here.start, settled(self.device), convert, self.cache, memory, 2 - flat)

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

    def _grids(self, image: tuple[int, ...]) -> tuple[TileGrid, dict[int, TileGrid]]:
        """The grid of tiles, and larger tiles for passes that make less of them, so that all need as much memory."""
        extents = {"data": image[0], **dict(zip(SPATIAL, image[2:], strict=False))}
        sizes: dict[str, int] = dict(zip(SPATIAL, self.way.plan.stream or (), strict=False))
        stride = total_stride(self.program, extents)
        ranks = {axis: (cuts, self.mesh.coordinates[axis]) for axis, cuts in self.cuts.items()}
        bands = bool(self.program.kept.host)

        def grid(times: float) -> TileGrid:
            chosen = as_bands(sizes, extents, times) if bands else enlarged(sizes, times)
            rounded = {axis: max(1, -(-size // stride) * stride) for axis, size in chosen.items()}
            return grid_of(extents, {"data": 1, **rounded}, ranks)

        passes, graph = self.program.passes, self.program.tiles
        if len(passes.passes) == 1:
            return grid(1.0), {}
        every = pass_weight(replace(passes.passes[0], calls=graph.calls), graph)
        weights = {one.number: pass_weight(one, graph) for one in passes.passes if not one.whole}
        return grid(1.0), {
            number: grid(min(MOST_TIMES, max(1.0, every / w / 2))) for number, w in weights.items() if w > 0
        }

    def _blocks(self) -> dict[int, str]:
        """The block of each call that the plan computes again in backward."""
        names = {id(module): name for name, module in self.held.plain.named_modules()}
        wanted = self.way.plan.recompute
        found = [f"model.{names[id(m)]}" for m in (chosen(self.held.plain, wanted) if wanted else ())]
        inside = ((c.node, n) for c in self.program.tiles.calls for n in found)
        return {node.id: n for node, n in inside if node.module == n or node.module.startswith(f"{n}.")}

    def _random_states(self) -> Callable[[int], None]:
        """Sets torch's generator before a random call as a step in one piece would have found it."""
        seed_generators(self.held.draw(), self.device)
        states: dict[int, Tensor] = {}
        for call in self.program.tiles.calls:
            if call.random:
                states[call.node.id] = torch.get_rng_state()
                for _ in range(call.random):
                    new_key()
        return lambda call: torch.set_rng_state(states[call])

    # -- results -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Give the inputs their gradients. Collective."""
        for given in self.inputs.values():
            given.finish(self.mesh)

    def joined(self, plain: dict[Place, Tensor]) -> Any:
        """The results as the model gives them: sharded where they have the image's dims."""

        def value(at: Any) -> Any:
            place = (at.source, at.pick)
            if place in plain:
                return plain[place]
            facts, kept = self.program.tiles.values[place], self.streamer.kept[place]
            if not any(facts.axes):
                return kept.read(kept.box)
            dims = zip(facts.axes, facts.shape, strict=True)
            cuts = tuple(None if a is None else self.cuts[a].scaled(n) for a, n in dims)
            layout = Layout(self.mesh, facts.shape, facts.axes, cuts, tuple(sorted(self.cuts.items())))
            return ShardedTensor(kept.read(layout.box), layout, "", facts.folds)

        return pytree.tree_map_only(At, value, self.program.graph.calls[0].outputs)

    def _single(self) -> Place:
        """The model's result, which has to be one tensor with the image's dims."""
        places = [p for p in self.streamer.results if p != self.streamer.loss_place or self.program.graph.calls[0].kind]
        found = [p for p in places if any(self.program.tiles.values[p].axes)]
        if len(found) != 1:
            raise PlanError(f"the model gives {len(found)} results in tiles, but a sink takes one: leave into= out")
        return found[0]

    def writer(self, into: Any) -> Callable[..., None]:
        """Writes tiles of the result into a sink for each image."""
        sinks = list(into) if isinstance(into, (list, tuple)) else [into]
        place = self._single()
        shape = self.program.tiles.values[place].shape
        if len(sinks) != shape[0] or any(tuple(s.shape) != shape[1:] for s in sinks):
            raise LayoutError(
                f"{len(sinks)} sinks of shape {[tuple(s.shape) for s in sinks]} for a result of shape {shape}: give "
                f"one for each image, of shape {shape[1:]}"
            )

        def write(at: Place, tile: ShardedTensor, task: Any) -> None:
            for row, number in enumerate(range(*tile.box[0])):
                kind = getattr(sinks[number], "dtype", None)
                values = tile.local[row].to(kind) if isinstance(kind, torch.dtype) else tile.local[row]
                sinks[number].write([tuple(i) for i in tile.box[1:]], values)

        return write

    def teller(self, sink: ResultSink) -> Callable[..., None]:
        """Gives tiles of the result, with their part of the target, to a sink."""
        results = [p for p in self.streamer.results if any(self.program.tiles.values[p].axes)]
        if len(results) != 1:
            return lambda *_: None
        facts = self.program.tiles.values[results[0]]
        sink.begin(facts.shape, facts.dtype)
        names = self.program.names[self.images :]

        def tell(at: Place, tile: ShardedTensor, task: Any) -> None:
            sink.take(ResultTile(tile.local, self._target_piece(names, tile.box, task), tile.box))

        return tell

    def _target_piece(self, names: Sequence[str], box: Box, task: Any) -> Tensor | None:
        if len(names) != 1:
            return None
        found = task.given.get((names[0], 0))
        if not isinstance(found, ShardedTensor):
            return None
        lead = found.ndim - (len(box) - 2)
        spans = (box[0], *found.box[1:lead], *box[2:]) if lead >= 1 else (box[0],)
        return found.local[slices_in(spans, found.box)]

    def close(self) -> None:
        """End the threads that read."""
        for given in getattr(self, "inputs", {}).values():
            if isinstance(given, SourceInput):
                given.close()


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


def memory_format(model: torch.nn.Module) -> torch.memory_format:
    """The memory format of a model's convolutions."""
    for weight in model.parameters():
        if weight.ndim == 4 and weight.shape[2] * weight.shape[3] > 1 and weight.shape[1] > 1:
            last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
            return torch.channels_last if last else torch.contiguous_format
    return torch.contiguous_format


def total_stride(program: StreamProgram, extents: dict[str, int]) -> int:
    """By how much the model divides the image's extents, where that many positions are left for tiles."""
    found = 1
    for value in program.tiles.values.values():
        for axis, extent in value.extents.items():
            if axis in SPATIAL and extent > 1 and extents[axis] // extent > found:
                ratio = round(extents[axis] / extent)
                found = ratio if ratio * 4 <= extents[axis] else found
    return found


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
    most = max(area, extents[SPATIAL[0]] // LEAST_BANDS)
    return {SPATIAL[0]: max(1, min(int(times * area), most)), **rest}


def free_memory() -> int:
    """How many bytes of the host's memory are free."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2**32


def device_limit(device: torch.device) -> int:
    """How many bytes this process may reserve on a GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    return int(min(total * fraction(device), torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))
