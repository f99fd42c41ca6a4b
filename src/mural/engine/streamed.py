"""A batch through a model in tiles that follow each other: one device, any image."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from mural.comm.failure.shared_fate import shared_fate
from mural.engine.garbage import older_objects_aside
from mural.engine.held_model import HeldModel
from mural.engine.inputs import Image, Needs, check_filled
from mural.engine.memory_room import device_limit, free_for_each, least_of_ranks, room_for_kept
from mural.engine.parameter_hooks import check_called, check_hooks
from mural.engine.result_tiles import ResultSink
from mural.engine.stream_program import Given, Objective, StreamProgram, captured, same_calls, stream_program
from mural.engine.stream_report import PredictedStep, predicted_step
from mural.engine.streamed_batch import StreamedBatch
from mural.errors import PlanError
from mural.graph.nodes import Place
from mural.memory.choice import Room, Speeds
from mural.memory.host_memory import HostMemory
from mural.memory.pinned import Buffers, settled
from mural.memory.stream import Streamer
from mural.memory.tile_calls import made_by
from mural.memory.tile_graphs import TileGraphs
from mural.plans import bytes_of
from mural.shard.autocasting import uncached_autocast
from mural.shard.generators import generators_kept

MOST_PROGRAMS = 8
"""How many programs are kept, those used last: images may come in many sizes."""


class _OtherCalls(Exception):
    """The model makes other calls than the program that runs."""


class Streamed:
    """Steps, inference and evaluation of a model that sees an image in tiles."""

    spans = ()

    def __init__(self, held: HeldModel):
        self.held, self.plan, self.transport = held, held.plan, held.world_mesh.transport
        self.mesh = held.mesh
        self.programs: dict[Any, StreamProgram] = {}
        self.buffers: Buffers | None = None
        self.hosted: HostMemory | None = None
        self.tile_graphs: TileGraphs | None = None
        self.keep: str | None = None
        """"all" or "none" of what need not be kept between passes; None: what makes a step fast."""
        self.like: StreamProgram | None = None
        """A program whose choices are followed, where this is a small case of it."""
        self.predicted: PredictedStep | None = None
        self.seconds: float | None = None
        """The last step: what is predicted for it, and the seconds that it took."""

    def verify(self, objective: Objective, given: Sequence[Given], program: StreamProgram) -> None:
        """Capture the model again, and raise if it makes other calls than the program; the GPU computes meanwhile."""
        graph = captured(objective, given)
        if not same_calls(graph, program.graph):
            self.programs = {key: other for key, other in self.programs.items() if other is not program}
            raise _OtherCalls
        if program.update(graph.held):
            raise _OtherCalls

    # -- calls ---------------------------------------------------------------------------------------------------------

    def step(self, image: Image, target: Any, reduce: bool, weight: float) -> Tensor:
        """The loss of the whole batch, on every rank, after forward and backward. Collective."""
        held = self.held

        def run(batch: StreamedBatch) -> Tensor:
            self.predicted = predicted_step(batch)
            if held.observe is not None:
                batch.streamer.do_meanwhile()  # a model that has changed is found before a tile is shown
                batch.streamer.deliver = batch.results.observer(held.observe)
            loss = batch.streamer.step(weight)
            held.check_loss(loss)
            batch.finish()
            self._add_gradients(batch)
            self._effects(batch.streamer)
            return loss

        begin = time.perf_counter()
        with shared_fate(self.transport):
            held.same_inputs.check("step", image=image, target=target)
            check_filled(image)
            check_called(held.plain)
            if held.world_mesh.world > 1:
                check_hooks(held.plain, held.hooks)
            held.calls += 1
            with self._scope():
                observed = held.observe is not None
                loss = self._run(image, target, "both" if observed else "loss", run, delivered=observed)
            if reduce:
                with held.reducer.watching():
                    pass
            self.transport.await_gpu("the step")
            self.seconds = time.perf_counter() - begin
            return loss

    @contextmanager
    def prepared(self, image: Image, target: Any, kind: str = "loss") -> Generator[StreamedBatch]:
        """A block with a batch as a step would go through it, of which nothing runs. Collective."""
        with shared_fate(self.transport), self._scope():
            batch = StreamedBatch(self, image, target, kind)
            try:
                yield batch
            finally:
                batch.close()

    def report(self) -> dict[str, Any]:
        """What is predicted for the last step (peak of memory, seconds, bytes over the link), and its seconds."""
        return {} if self.predicted is None else self.predicted.report(self.seconds, self.limit())

    def call(self, image: Image, into: Any = None) -> Any:
        """The model's result without gradients, sharded, or given to sinks tile by tile. Collective."""

        def run(batch: StreamedBatch) -> Any:
            if into is not None:
                batch.streamer.do_meanwhile()
                batch.streamer.deliver = batch.results.into(into)
            plain = self._infer(batch)
            return None if into is not None else batch.results.joined(plain)

        with shared_fate(self.transport), torch.no_grad(), self._scope():
            self.held.same_inputs.check("call", image=image)
            return self._run(image, None, "result", run, delivered=into is not None)

    def evaluate(self, image: Image, target: Any) -> tuple[Any, Any, Tensor]:
        """The model's result, the target cut like it, and the loss of the whole batch; no gradients. Collective."""
        with shared_fate(self.transport), torch.no_grad(), self._scope():
            self.held.same_inputs.check("evaluate", image=image, target=target)
            loss, output = self._run(image, target, "both", lambda batch: batch.results.joined(self._infer(batch)))
            return output, self.held.inputs.target(target, image), loss

    def evaluate_into(self, image: Image, target: Any, sink: ResultSink) -> Tensor:
        """The loss of the whole batch, while the sink takes result and target tile by tile. Collective."""

        def run(batch: StreamedBatch) -> Tensor:
            batch.streamer.do_meanwhile()
            batch.streamer.deliver = batch.results.teller(sink, "use evaluate(…)")
            return batch.results.result(batch.streamer.loss_place, self._infer(batch))

        with shared_fate(self.transport), torch.no_grad(), self._scope():
            self.held.same_inputs.check("evaluate", image=image, target=target)
            return self._run(image, target, "both", run, delivered=True)

    def needs(self, training: bool, number: int = 0) -> Needs:
        """What this rank takes of every batch: sources, which it reads by windows."""
        return Needs(self.held.world_mesh, by_window=True)

    # -- parts ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _scope(self) -> Generator[None]:
        """What holds while the model runs: the precision of the plan; and casts of parameters go with their tile."""
        device = self.held.device
        with ExitStack() as stack:
            stack.enter_context(uncached_autocast())
            stack.enter_context(generators_kept(device))
            stack.enter_context(older_objects_aside())
            if self.plan.precision == "bfloat16":
                stack.enter_context(torch.autocast(device.type, torch.bfloat16))
            yield

    def _run(
        self, image: Image, target: Any, kind: str, run: Callable[[StreamedBatch], Any], delivered: bool = False
    ) -> Any:
        """What `run` gives for a batch; from the start, if the model is found to have changed at its first tile."""
        for _ in range(2):
            batch = StreamedBatch(self, image, target, kind, delivered)
            try:
                return run(batch)
            except _OtherCalls:
                continue
            finally:
                batch.close()
        raise PlanError("the model makes other calls each time that it is asked: it cannot be streamed")

    def program(
        self, objective: Objective, given: Sequence[Given], kind: str, delivered: bool
    ) -> tuple[StreamProgram, bool]:
        """The program for these inputs, and whether it was known before: then its calls have to be verified."""
        modes = tuple(module.training for module in objective.model.modules())
        state = (*objective.named_parameters(), *objective.named_buffers())
        key = (
            tuple(given),
            objective.wanted,
            kind,
            delivered,
            modes,
            tuple((name, t.shape, t.dtype) for name, t in state),
        )
        found = self.programs.pop(key, None)
        known = found is not None
        if found is None:
            tile = self.plan.stream or ()
            found = stream_program(objective, given, tile, self._room(), self.keep, delivered, self.like)
        self.programs[key] = found
        for old in [*self.programs][:-MOST_PROGRAMS]:
            del self.programs[old]
        return found, known

    def limit(self) -> int | None:
        """The bytes that this rank may take: as the plan says, or as torch does; None on a device without a limit."""
        if self.plan.memory:
            return bytes_of(self.plan.memory)
        return device_limit(self.held.device) if self.held.device.type == "cuda" else None

    def _room(self) -> Room:
        """The room for kept values."""
        device = self.held.device
        itemsize = 2 if self.plan.precision == "bfloat16" else 8
        if device.type != "cuda":
            return Room(None, 0, itemsize, Speeds(flops=1e11, memory=1e10))
        memory, host = least_of_ranks(self.held.world_mesh, device, self.limit() or 0, self.free_host())
        return room_for_kept(memory, host, itemsize)

    def free_host(self) -> int:
        """How many bytes of the host are free for this rank. Collective."""
        return free_for_each(self.held.world_mesh, self.held.device)

    def host_memory(self, bands: int) -> HostMemory:
        """The host memory of kept values for a step that begins; they pass through so many bytes on the device."""
        if self.hosted is None:
            self.hosted = HostMemory(settled(self.held.device))
        self.hosted.begin(bands)
        return self.hosted

    def graphs(self, program: StreamProgram) -> TileGraphs | None:
        """The graphs of tiles for a program, on a GPU; None if its passes hand on tensors, which need the memory."""
        device, limit = self.held.device, self.limit()
        if self.tile_graphs is None and device.type == "cuda" and limit is not None:
            self.tile_graphs = TileGraphs(settled(device), limit)
        if self.tile_graphs is not None and any(one.keeps for one in program.passes.passes):
            self.tile_graphs.release()
            return None
        return self.tile_graphs

    def memory(self) -> Buffers:
        """The pinned memory that windows travel through, kept from step to step."""
        if self.buffers is None:
            self.buffers = Buffers(settled(self.held.device), keep=12)
        return self.buffers

    def _add_gradients(self, batch: StreamedBatch) -> None:
        """Add what the tiles found to the parameters' gradients, scaled so that their mean over the ranks is true.

        Hooks see the gradient of the whole step, as in torch; on several ranks, this rank's part of it.
        """
        replicas, streamer = self.mesh.replicas, batch.streamer
        with torch.no_grad():
            tiles, shared = streamer.sums.found, streamer.shared
            for name in {**tiles, **shared}:
                found = [own_times(tiles[name], replicas, name in streamer.sums.lasting)] if name in tiles else []
                found += [shared[name]] if name in shared else []
                parameter, total = batch.parameters[name], sum(found[1:], found[0])
                for hook in (parameter._backward_hooks or {}).values():
                    changed = hook(total)
                    total = total if changed is None else changed
                parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
                for told in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                    told(parameter)

    def _infer(self, batch: StreamedBatch) -> dict[Place, Tensor]:
        """The results that are no tiles; as in torch, norms in training mode learn."""
        found = batch.streamer.infer()
        self._effects(batch.streamer)
        return found

    def _effects(self, streamer: Streamer) -> None:
        """What a forward does next to its results, once: the counting of batches."""
        made: dict[Place, Any] = {}
        with torch.no_grad():
            for call in streamer.passes.graph.effects:
                if call.random:
                    streamer.before_random(call.node.id)
                given = [made[p] if p in made else streamer.held[str(p[0])] for p in call.node.reads]
                for _ in range(1 + call.node.repeated):
                    made |= made_by(call.node, call.form.call(given, streamer.device), given)


def own_times(tensor: Tensor, times: int, lasting: bool) -> Tensor:
    """A tensor times a number; in memory of its own, if that of the tensor is used again."""
    return tensor * times if times > 1 else tensor.clone() if lasting else tensor
