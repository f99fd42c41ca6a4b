"""A batch through a model in one stage and in one piece: the module itself is called, and nothing is captured."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.channel.misuse import ShareWatch
from mural.comm.failure.shared_fate import shared_fate
from mural.engine.held_model import HeldModel
from mural.engine.inputs import Image, Inputs, Needs, check_filled
from mural.engine.loss_leaves import check_leaves
from mural.engine.parameter_hooks import check_hooks, make_plain
from mural.shard import batchnorm_scope
from mural.shard.forward_gradients import whole_gradients
from mural.shard.generators import generators_kept, seed_generators


class Unsplit:
    """Steps, inference and evaluation of a model that every rank runs as a whole."""

    spans = ()

    def __init__(self, held: HeldModel):
        self.held, self.plan, self.transport = held, held.plan, held.world_mesh.transport

    def step(self, image: Image, target: Any, reduce: bool, weight: float) -> Tensor:
        """The loss of the whole batch, on every rank, after forward and backward. Collective."""
        with shared_fate(self.transport):
            loss = self._step(image, target, reduce, weight)
            self.held.average_statistics()
            self.transport.await_gpu("the step")
            return self._over_parts(loss.detach())

    def _step(self, image: Image, target: Any, reduce: bool, weight: float) -> Tensor:
        held = self.held
        with ExitStack() as stack:
            loss = self._forward(image, target, stack)
            if reduce:
                stack.enter_context(held.reducer.watching())
            (loss * weight if weight != 1.0 else loss).backward()
        return loss

    def _forward(self, image: Image, target: Any, stack: ExitStack) -> Tensor:
        """The loss; what backward does not need ends here: the pieces of the images, and the model's result."""
        held = self.held
        held.same_inputs.check("step", image=image, target=target)
        images, goal = held.inputs.images(image), held.inputs.target(target, image)
        check_filled(image)  # now that all ranks gave the same inputs
        if held.world_mesh.world > 1 and any(p._backward_hooks for _, p in held.reducer.named):
            check_hooks(held.plain, held.hooks)
        held.calls += 1  # by steps alone: how many batches a validation has depends on the plan
        stack.enter_context(batchnorm_scope(self.plan.norm_scope))  # checkpoints recompute batch norms in backward
        with self._scope():
            with whole_gradients(held.mesh):
                output = held.module(*images)
            if held.observe is not None:
                held.observe(output)
            with whole_gradients(held.mesh):
                loss = held.loss(output, goal)
            held.check_loss(loss)
        if held.looks_at_leaves():
            check_leaves(loss, (images, goal), held.parameters(), held.plain, held.loss)
        return loss

    def call(self, image: Image) -> Any:
        """The model's result without gradients. Collective."""
        with shared_fate(self.transport), torch.no_grad(), self._scope(), self.transport.attentive("inference"):
            self.held.same_inputs.check("call", image=image)
            return self.held.module(*self.held.inputs.images(image))

    def evaluate(self, image: Image, target: Any) -> tuple[Any, Any, Tensor]:
        """The model's result, the target cut like it, and the loss of the whole batch; no gradients. Collective."""
        held = self.held
        inputs = Inputs(held.plain, held.world_mesh, held.world_mesh)
        with shared_fate(self.transport), torch.no_grad(), self._scope():
            held.same_inputs.check("evaluate", image=image, target=target)
            images, goal = inputs.images(image), inputs.target(target, image)
            check_filled(image)
            output = held.module(*images)
            return output, goal, held.loss(output, goal)

    def needs(self, training: bool, number: int = 0) -> Needs:
        """What this rank takes of every batch: its images and targets."""
        return Needs(self.held.world_mesh)

    @contextmanager
    def _scope(self) -> Generator[None]:
        """What holds while the model runs: this call's random numbers, precision, whose statistics BatchNorm takes."""
        device = self.held.device
        with ExitStack() as stack:
            stack.enter_context(generators_kept(device))
            seed_generators(self.held.draw(), device)
            if self.plan.precision == "bfloat16":
                stack.enter_context(torch.autocast(device.type, torch.bfloat16))
            stack.enter_context(batchnorm_scope(self.plan.norm_scope))
            if self.held.shares:
                stack.enter_context(ShareWatch())
            yield
        make_plain(self.held.buffered)

    def _over_parts(self, loss: Tensor) -> Tensor:
        """The mean of the data ranks' own losses, where each trains alone."""
        if self.held.span.parts > 1:
            loss = self.transport.outbound(loss.clone())
            work = dist.all_reduce(loss, group=self.transport.group, async_op=True)
            self.transport.wait_for(work, "the mean of losses")
            loss /= self.held.world_mesh.world
        return loss
