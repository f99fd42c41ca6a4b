"""A model under a plan that cuts it into stages: the calls of `Parallel`, with each rank holding its stages alone."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree as pytree

from mural.comm.channels import Channels
from mural.comm.verdict import shared_fate
from mural.engine.batch_pass import Passage, Training
from mural.engine.concord import Concord
from mural.engine.division import Division, Holders, release
from mural.engine.extra_state import extra_of_owners
from mural.engine.gems_statistics import Statistics
from mural.engine.inputs import Image, Inputs, check_image, on_seat, shape_of
from mural.engine.loss_leaves import check_leaves
from mural.engine.loss_terms import LossTerms
from mural.engine.microbatches import rows_of
from mural.engine.needs import Needs
from mural.engine.other_stages import check_present, naming_absent
from mural.engine.parallel import Loss, Parallel
from mural.engine.parameter_hooks import check_hooks
from mural.engine.rebound_buffers import make_plain
from mural.engine.remote_results import staged
from mural.engine.same_inputs import Likeness
from mural.engine.stage_programs import Itineraries, Trip
from mural.engine.step_loss import StepLoss
from mural.engine.unwrapped import unwrapped
from mural.engine.whole_state import WholeState
from mural.gradients.reducer import GradientSums
from mural.graph import Graph
from mural.pipeline.runner import Runner
from mural.pipeline.step_runs import Runs, moving, shared_apart
from mural.plans import Plan
from mural.ranks import Mesh
from mural.shard import ShardedTensor, batchnorm_scope
from mural.shard.batch_rows import Rows
from mural.shard.unread import Unread


class Pipelined(Parallel):
    """A model in stages: steps, inference, and the model's own names for what this rank holds.

    Each parameter lives on the ranks of the stages that use it. A step runs this rank's list of actions. Gradients are
    averaged over the ranks of each stage, and added up where stages or replicas share a parameter; each leaves in the
    last backward that adds to it.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, loss: Loss, seed: int, division: Division):
        self.module, self.plan, self.world_mesh, self.loss, self.seed = model, plan, mesh, loss, seed
        self.plain = unwrapped(model)
        self.buffered = tuple(module for module in self.plain.modules() if module._buffers)
        self.loss_terms, self.hooks = LossTerms.of(loss, self.plain), dict[int, Any]()
        self.loss_terms.settle(self.device, mesh)
        self.division, self.seating = division.with_loss(self.loss_terms), division.seating
        self.mesh = self.seating.mesh
        self.inputs, self.likeness = Inputs(self.plain, self.mesh, self.mesh), Likeness(mesh)
        self.holders = Holders(self.division, mesh)
        release(self.plain, division)
        sets = self.holders.sets(self.named_parameters(), 1 / self.mesh.replicas)
        self.reducer = GradientSums(sets, mesh, algorithm=plan.all_reduce)
        channels = Channels.of(mesh.transport) if len(self.seating.meshes) > 1 else None
        self.runner = Runner(channels, self.device)
        self.itineraries = Itineraries(self.plain, self.division)
        self.calls = self.updates = 0
        self.observe = None
        self.unreduced = False
        self.concord = Concord(mesh, self.mesh, channels)

    def step(self, image: Image, target: Any, *, reduce: bool = True, weight: float = 1.0) -> Tensor:
        """The loss of the whole batch, on every rank, after forward and backward. Collective.

        Gradients are added to `.grad`. `reduce=False` leaves the sums over ranks to a later step, which then sends
        once for all; `weight` is the part of this batch in what is accumulated.
        """
        # All ranks agree how the step ended before the block does: where one failed, all send void gradients.
        with self.reducer.watching(self._is_last) if reduce else nullcontext(), self.concord.step():
            self.likeness.check("step", image=image, target=target)
            image, target = self._adopted(image), self._adopted(target)
            check_image(image)
            rows = rows_of(shape_of(image)[0], self.plan.microbatches)
            hooked = any(p._backward_hooks for p in self.itineraries.parameters)
            if hooked and (self.world_mesh.world > 1 or len(rows) > 1):
                check_hooks(self.plain, self.hooks)
            passage, trip, graph = self._prepared(image, rows, training=True)
            whole = self.plan.schedule == "gpipe" or len(rows) == 1
            loss = self._scoped_loss if whole else StepLoss(self._scoped_loss, self.loss, self.plain)
            job = Training(passage, target, loss, weight, whole, self.observe)
            statistics = Statistics(self.plain, self.division, graph, trip.program.schedule)
            for (replica, stage), found in passage.stages.items():
                found.aside = statistics.aside(replica, stage)
            self.calls += 1
            self.reducer.reopen()
            self._run(job, trip)
        with torch.no_grad():
            statistics.merge(self.holders)
            if self.plan.norm_scope == "rank" and self.plain.training:
                for name, buffer in self.named_buffers():
                    self.holders.average(buffer, self.division.holders[name])
        self.unreduced = not reduce
        return self._shared(job.total(), self.drawn)

    def __call__(self, image: Image) -> Any:
        """The model's result without gradients: a sharded tensor on the last stage's ranks. Collective.

        On the other ranks it has a shape and no piece; `full()` is collective over all ranks.
        """
        with torch.no_grad(), self.concord.step():
            self.likeness.check("call", image=image)
            passage = self._passed(image)
        return staged(passage.joined, self.seating, self.world_mesh, self.device)

    def evaluate(self, image: Image, target: Any) -> tuple[Any, Any, Tensor]:
        """The model's result, the target cut like it, and the loss of the whole batch; no gradients. Collective.

        Result and target are None on ranks that do not hold the last stage.
        """
        output, goal, loss = None, None, None
        with torch.no_grad(), self.concord.step():
            self.likeness.check("evaluate", image=image, target=target)
            passage = self._passed(image)
            if passage.results:
                output, goal = passage.joined(), self.inputs.target(self._adopted(target), passage.image)
                loss = self._scoped_loss(output, goal).double()
        return output, goal, self._shared(loss)

    def _passed(self, image: Image) -> Passage:
        """All micro-batches forward; batch norms that look at the batch see it whole."""
        image = self._adopted(image)
        check_image(image)
        rows = rows_of(shape_of(image)[0], 1 if self.plain.training else self.plan.microbatches)
        passage, trip, _ = self._prepared(image, rows, training=False)
        self._run(passage, trip)
        return passage

    def from_last(self, value: Any) -> Any:
        """What was computed where the model's results are, on every rank. Collective."""
        if self.world_mesh.world > 1:
            told = [value]
            owner = self.seating.ranks(self.seating.schedule(1).seat_of[0, self.plan.stages - 1])[0]
            dist.broadcast_object_list(told, src=owner, group=self.world_mesh.transport.group)
            return told[0]
        return value

    def needs(self, training: bool) -> Needs:
        """What this rank's stages take of every batch: the image where one reads it, the target where the loss is."""
        stages = {stage for _, stage in self.itineraries.schedule(1, training).holds(self.seating.own)}
        return Needs(self.mesh, bool(stages & self.division.takers), self.plan.stages - 1 in stages)

    def _adopted(self, batch: Any) -> Any:
        """A batch whose tensors on the run's mesh became tensors on this seat's: the same pieces, or parts of them."""
        if self.mesh == self.world_mesh:
            return batch
        return pytree.tree_map_only((ShardedTensor, Unread), lambda x: on_seat(x, self.world_mesh, self.inputs), batch)

    # -- running ------------------------------------------------------------------------------------------------------

    def _prepared(self, image: Image, rows: Sequence[Rows], training: bool) -> tuple[Passage, Trip, Graph | None]:
        """The passage of a batch in these micro-batches, the lists that ranks run for it, and its stages' calls."""
        device = self.device
        route = self.itineraries.route(image, device)
        stages = self.itineraries.stages(route, image, self._scope, device)
        passage = Passage(self.inputs, image, rows, stages)
        passage.names = () if route is None else tuple(value.name for value in route.graph.inputs)
        several = len(rows) > 1 or len(stages) > 1 or self.plan.recompute == "stages"
        passed = moving(self.itineraries.modules) if self.plan.norms_apart and len(rows) > 1 else frozenset[int]()
        self.runs = Runs(self.itineraries.modules, None if route is None else route.script, several, passed)
        for (_, stage), found in stages.items():
            found.first, found.second = partial(self.runs.run, stage), partial(self.runs.again, stage)
        trip = self.itineraries.trip(route, image, len(rows), training)
        return passage, trip, None if route is None else route.graph

    def _run(self, job: Passage, trip: Trip) -> None:
        """Carry out this rank's actions."""
        self.concord.begin()
        try:
            self.runner.run(trip.program, trip.seats, job, trip.known, trip.learning, self.draw())
            self.drawn = self.runs.end()
        except BaseException:
            self.runner.forget()
            self.runs.undo()
            raise
        trip.known.complete = True

    @contextmanager
    def _scope(self) -> Generator[None]:
        """What holds while a stage computes: precision, and whose statistics BatchNorm takes."""
        with ExitStack() as stack:
            if self.plan.precision == "bfloat16":
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            stack.enter_context(batchnorm_scope(self.plan.batchnorm))
            yield
        make_plain(self.buffered)

    def _scoped_loss(self, output: Any, target: Any) -> Tensor:
        with self._scope(), naming_absent(self.loss, self.plain, (output, target)):
            loss = self.loss(output, target)
        if getattr(loss, "is_meta", False):
            check_present(self.loss, self.plain, (output, target), None)
        self.check_loss(loss)
        if torch.is_grad_enabled() and self.looks_at_leaves():
            check_leaves(loss, (output, target), self.parameters(), self.plain, self.loss)
        return loss

    def _shared(self, loss: Tensor | None, drawn: int = 0) -> Tensor:
        """The sum of the losses that the last stages computed, on every rank.

        `drawn` has to be the same on all ranks: equal numbers have a mean of squares that is the square of their mean.
        """
        first = loss is not None and self.mesh.rank == self.seating.ranks(self.seating.own)[0]
        value = torch.tensor([0.0, drawn, drawn**2], dtype=torch.float64)
        if loss is not None and first:
            value[0] = loss.double()
        if self.world_mesh.world > 1:
            value = self.world_mesh.transport.outbound(value)
            with self.world_mesh.transport.meeting("loss"):
                dist.all_reduce(value, group=self.world_mesh.transport.group)
        if float(value[1]) ** 2 != float(value[2]) * self.world_mesh.world:
            raise shared_apart(name for found in self.runs.shared.values() for name in found)
        kinds = (p.dtype for p in self.plain.parameters() if p.is_floating_point())
        return value[0].to(self.device, next(kinds, torch.float32))

    # -- gradients and updates ----------------------------------------------------------------------------------------

    def _is_last(self, name: str) -> bool:
        """Whether no backward to come on this rank adds to a parameter."""
        return not any(self.runner.left[stage] for stage in self.division.stages[name])

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole gradient, which is scaled down where it is larger than `max_norm`. Collective."""
        self.reduce_gradients()
        rank = self.world_mesh.rank
        held = [(self.division.holders[name], p.grad) for name, p in self.named_parameters() if p.grad is not None]
        own = [grad for ranks, grad in held if ranks[0] == rank]
        mine = nn.utils.get_total_norm(own, norm_type).double().cpu() if own else torch.zeros((), dtype=torch.float64)
        power = norm_type != float("inf")
        total = (mine**norm_type if power else mine).view(1)
        if self.world_mesh.world > 1:
            total = self.world_mesh.transport.outbound(total)
            op = dist.ReduceOp.SUM if power else dist.ReduceOp.MAX
            with self.world_mesh.transport.meeting("norm"):
                dist.all_reduce(total, op=op, group=self.world_mesh.transport.group)
        norm = total[0] ** (1 / norm_type) if power else total[0]
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, grad in held:
            grad.mul_(scale.to(grad.device, grad.dtype))
        return norm.to(self.device)

    # -- the model's own names ----------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank holds."""
        return (p for _, p in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, under the names of the unsplit model."""
        named = chain(self.plain.named_parameters(), self.loss_terms.named_parameters())
        return ((name, p) for name, p in named if self.division.holds(name))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this rank holds, under the names of the unsplit model."""
        named = chain(self.plain.named_buffers(), self.loss_terms.named_buffers())
        return ((name, b) for name, b in named if self.division.holds(name))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        held = (t.device for t in chain(self.plain.parameters(), self.plain.buffers()) if not t.is_meta)
        return next(held, torch.device("cpu"))

    @property
    def first_stage(self) -> int:
        """The first stage of the model that this rank holds."""
        return min(self.seating.stages_here())

    def actions(self) -> tuple[tuple[str, float, float], ...]:
        """What stages did in the last step on this rank: name, begin and end, of `time.perf_counter`."""
        return tuple((str(action), begin, end) for action, begin, end in self.runner.spans)

    def state_dict(self, rank0: bool = False) -> dict[str, Any]:
        """The unsplit model's state on the CPU, on every rank or, with `rank0`, on rank 0 alone. Collective."""
        with shared_fate(self.world_mesh.transport), self.loss_terms.attached():
            return WholeState(self.plain, self.division, self.world_mesh).gathered(rank0)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, rank0: bool = False) -> _IncompatibleKeys:
        """Take over the unsplit model's state, as torch does; with `rank0`, the one that rank 0 gives. Collective.

        Missing and unexpected keys are returned as torch returns them, on every rank.
        """
        with self.loss_terms.attached():
            return WholeState(self.plain, self.division, self.world_mesh).load(state, strict, rank0)

    @contextmanager
    def whole_extra_states(self) -> Generator[None]:
        """A block in which every module's `get_extra_state` gives that of the unsplit model. Collective."""
        with self.loss_terms.attached(), extra_of_owners(self.plain, self.world_mesh, self.division.keeper):
            yield
