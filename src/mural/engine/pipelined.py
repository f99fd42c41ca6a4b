"""A batch through a model in stages and micro-batches: each rank runs its list of actions."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.comm.channels import Channels
from mural.comm.failure.agree import AgreedSteps
from mural.engine.batch_pass import BatchPass, Training
from mural.engine.gems_statistics import Statistics
from mural.engine.held_model import HeldModel
from mural.engine.inputs import Image, Needs, check_image, on_seat, shape_of
from mural.engine.loss_leaves import check_leaves, check_present, naming_absent
from mural.engine.loss_terms import StepLoss
from mural.engine.microbatches import rows_of
from mural.engine.parameter_hooks import check_hooks, make_plain
from mural.engine.remote_results import staged
from mural.engine.stage_programs import StageProgram, StagePrograms
from mural.graph import Graph
from mural.pipeline.runner import Runner
from mural.pipeline.schedule import Action
from mural.pipeline.step_runs import Runs, moving, shared_apart
from mural.shard import ShardedTensor, batchnorm_scope
from mural.shard.generators import generators_kept, set_random_state
from mural.shard.in_time import Rows
from mural.shard.unread import Unread


class Pipelined:
    """Steps, inference and evaluation of a model whose stages work on one micro-batch after the other.

    Each parameter lives on the ranks of the stages that use it. Gradients are averaged over the ranks of each stage,
    and added up where stages or replicas share a parameter; each leaves in the last backward that adds to it.
    """

    def __init__(self, held: HeldModel):
        self.held, self.plan, self.stage_ranks = held, held.plan, held.stage_ranks
        channels = Channels.of(held.world_mesh.transport) if len(self.stage_ranks.meshes) > 1 else None
        self.runner = Runner(channels, held.device)
        self.stage_programs = StagePrograms(held.plain, held.division)
        self.steps = AgreedSteps(held.world_mesh.transport, held.mesh.transport, channels)

    @property
    def spans(self) -> list[tuple[Action, float, float]]:
        """When each action of the last run began and ended."""
        return self.runner.spans

    def step(self, image: Image, target: Any, reduce: bool, weight: float) -> Tensor:
        """The loss of the whole batch, on every rank, after forward and backward. Collective."""
        # All ranks agree how the step ended before the block does: where one failed, all send void gradients.
        with self.held.reducer.watching(self._is_last) if reduce else nullcontext(), self.steps.step():
            self.held.same_inputs.check("step", image=image, target=target)
            image, target = self._adopted(image), self._adopted(target)
            check_image(image)
            rows = rows_of(shape_of(image)[0], self.plan.microbatches)
            hooked = any(p._backward_hooks for p in self.stage_programs.parameters)
            if hooked and (self.held.world_mesh.world > 1 or len(rows) > 1):
                check_hooks(self.held.plain, self.held.hooks)
            batch, lists, graph = self._prepared(image, rows, training=True)
            whole = self.plan.schedule == "gpipe" or len(rows) == 1
            loss = self._scoped_loss if whole else StepLoss(self._scoped_loss, self.held.loss, self.held.plain)
            job = Training(batch, target, loss, weight, whole, self.held.observe)
            statistics = Statistics(self.held.plain, self.held.division, graph, lists.program.schedule)
            for (replica, stage), found in batch.stages.items():
                found.aside = statistics.aside(replica, stage)
            self.held.calls += 1
            self.held.reducer.reopen()
            self._run(job, lists)
        with torch.no_grad():
            statistics.merge(self.held.holders)
        self.held.average_statistics()
        return self._shared(job.total(), self.drawn)

    def call(self, image: Image) -> Any:
        """The model's result without gradients: a sharded tensor on the last stage's ranks. Collective."""
        with torch.no_grad(), self.steps.step():
            self.held.same_inputs.check("call", image=image)
            batch = self._passed(image)
        return staged(batch.joined, self.stage_ranks, self.held.world_mesh, self.held.device)

    def evaluate(self, image: Image, target: Any) -> tuple[Any, Any, Tensor]:
        """The model's result, the target cut like it, and the loss of the whole batch; no gradients. Collective.

        Result and target are None on ranks that do not hold the last stage.
        """
        output, goal, loss = None, None, None
        with torch.no_grad(), self.steps.step():
            self.held.same_inputs.check("evaluate", image=image, target=target)
            batch = self._passed(image)
            if batch.results:
                output, goal = batch.joined(), self.held.inputs.target(self._adopted(target), batch.image)
                loss = self._scoped_loss(output, goal).double()
        return output, goal, self._shared(loss)

    def _passed(self, image: Image) -> BatchPass:
        """All micro-batches forward; batch norms that look at the batch see it whole."""
        image = self._adopted(image)
        check_image(image)
        rows = rows_of(shape_of(image)[0], 1 if self.held.plain.training else self.plan.microbatches)
        batch, lists, _ = self._prepared(image, rows, training=False)
        self._run(batch, lists)
        return batch

    def needs(self, training: bool, number: int = 0) -> Needs:
        """What this rank's stages take of every batch: an input where one reads it, the target where the loss is."""
        stages = {stage for _, stage in self.stage_programs.schedule(1, training).holds(self.stage_ranks.own)}
        takers = self.held.division.takers
        return Needs(self.held.mesh, not takers or bool(stages & takers[number]), self.plan.stages - 1 in stages)

    def _adopted(self, batch: Any) -> Any:
        """A batch whose tensors on the run's mesh became tensors on this seat's: the same pieces, or parts of them."""
        if self.held.mesh == self.held.world_mesh:
            return batch
        return pytree.tree_map_only(
            (ShardedTensor, Unread), lambda x: on_seat(x, self.held.world_mesh, self.held.inputs), batch
        )

    # -- running ------------------------------------------------------------------------------------------------------

    def _prepared(
        self, image: Image, rows: Sequence[Rows], training: bool
    ) -> tuple[BatchPass, StageProgram, Graph | None]:
        """The pass of a batch in these micro-batches, the lists that ranks run for it, and its stages' calls."""
        device = self.held.device
        route = self.stage_programs.route(image, device)
        stages = self.stage_programs.stages(route, image, self._scope, device)
        batch = BatchPass(self.held.inputs, image, rows, stages)
        batch.names = () if route is None else tuple(value.name for value in route.graph.inputs)
        several = len(rows) > 1 or len(stages) > 1 or self.plan.recompute == "stages"
        passed = moving(self.stage_programs.modules) if self.plan.norms_apart and len(rows) > 1 else frozenset[int]()
        self.runs = Runs(self.stage_programs.modules, None if route is None else route.script, several, passed)
        for (_, stage), found in stages.items():
            found.first, found.second = partial(self.runs.run, stage), partial(self.runs.again, stage)
            found.third = partial(self.runs.backward, stage)
        lists = self.stage_programs.stage_program(route, image, len(rows), training)
        return batch, lists, None if route is None else route.graph

    def _run(self, job: BatchPass, lists: StageProgram) -> None:
        """Carry out this rank's actions."""
        self.steps.begin()
        try:
            self.runner.run(lists.program, lists.seats, job, lists.known, lists.learning, self.held.draw())
            self.drawn = self.runs.end()
        except BaseException:
            self.runner.forget()
            self.runs.undo()
            raise
        lists.known.complete = True

    @contextmanager
    def _scope(self) -> Generator[None]:
        """What holds while a stage computes: precision, and whose statistics BatchNorm takes."""
        with ExitStack() as stack:
            if self.plan.precision == "bfloat16":
                stack.enter_context(torch.autocast(self.held.device.type, torch.bfloat16))
            stack.enter_context(batchnorm_scope(self.plan.batchnorm))
            yield
        make_plain(self.held.buffered)

    def _scoped_loss(self, output: Any, target: Any) -> Tensor:
        device = self.held.device
        with generators_kept(device), self._scope(), naming_absent(self.held.loss, self.held.plain, (output, target)):
            set_random_state(self.runner.random, device)
            loss = self.held.loss(output, target)
        if getattr(loss, "is_meta", False):
            check_present(self.held.loss, self.held.plain, (output, target), None)
        self.held.check_loss(loss)
        if torch.is_grad_enabled() and self.held.looks_at_leaves():
            check_leaves(loss, (output, target), self.held.parameters(), self.held.plain, self.held.loss)
        return loss

    def _shared(self, loss: Tensor | None, drawn: int = 0) -> Tensor:
        """The sum of the losses that the last stages computed, on every rank.

        `drawn` has to be the same on all ranks: equal numbers have a mean of squares that is the square of their mean.
        """
        first = loss is not None and self.held.mesh.rank == self.stage_ranks.ranks(self.stage_ranks.own)[0]
        value = torch.tensor([0.0, drawn, drawn**2], dtype=torch.float64)
        if loss is not None and first:
            value[0] = loss.double()
        if self.held.world_mesh.world > 1:
            value = self.held.world_mesh.transport.outbound(value)
            with self.held.world_mesh.transport.meeting("loss"):
                dist.all_reduce(value, group=self.held.world_mesh.transport.group)
        if float(value[1]) ** 2 != float(value[2]) * self.held.world_mesh.world:
            raise shared_apart(name for found in self.runs.shared.values() for name in found)
        kinds = (p.dtype for p in self.held.plain.parameters() if p.is_floating_point())
        return value[0].to(self.held.device, next(kinds, torch.float32))

    def _is_last(self, name: str) -> bool:
        """Whether no later backward on this rank adds to a parameter."""
        return not any(self.runner.left[stage] for stage in self.held.division.stages[name])
