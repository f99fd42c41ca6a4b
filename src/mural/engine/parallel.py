"""A model under a plan: it runs steps, and answers for the model as if it had never been divided."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from mural.channel.misuse import Watch
from mural.channel.share import shares_among
from mural.comm.agree import any_rank
from mural.comm.verdict import settle, shared_fate
from mural.engine.channel_state import clip_shared, joined_state, load_joined
from mural.engine.extra_state import load_replicated, on_cpu
from mural.engine.inputs import Image, Inputs, check_filled
from mural.engine.loss_leaves import check_leaves
from mural.engine.loss_terms import LossTerms
from mural.engine.needs import Needs
from mural.engine.parameter_hooks import check_hooks
from mural.engine.rebound_buffers import make_plain
from mural.engine.same_inputs import Likeness
from mural.engine.unwrapped import unwrapped
from mural.errors import LayoutError
from mural.gradients import Reducer
from mural.gradients.average import average
from mural.gradients.waiting import wait_for
from mural.plans import Plan
from mural.ranks import SPATIAL, Mesh
from mural.shard import ShardedTensor, batchnorm_scope
from mural.shard.generators import generators_kept, seed_generators

Loss = Callable[[Any, Any], Tensor]


class Parallel:
    """A model under a plan: steps, inference, and the model's own names for what it holds.

    `calls` counts the steps begun; with the seed it decides what random layers draw, so a resumed run sets it.
    """

    loss_terms = LossTerms()
    """The loss's own parameters and buffers, `loss.*` among the model's names."""
    hooks: dict[int, Any]
    """The hooks on parameters that were looked at."""
    looks = 0
    """How many steps have asked whether to look at the leaves of the loss's graph."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, loss: Loss, seed: int):
        self.module, self.plan, self.world_mesh, self.loss, self.seed = model, plan, mesh, loss, seed
        self.plain = unwrapped(model)
        self.buffered = tuple(module for module in self.plain.modules() if module._buffers)
        # Where each data rank trains alone, nothing of a step travels along the data axis.
        self.mesh = mesh.alone() if plan.average else mesh
        self.inputs, self.likeness = Inputs(self.plain, self.mesh, mesh), Likeness(mesh)
        self.loss_terms, self.hooks = LossTerms.of(loss, self.plain), dict[int, Any]()
        self.loss_terms.settle(self.device, mesh)
        axes = SPATIAL if plan.average else None
        self.shares = shares_among(model.parameters())
        """What this rank holds of parameters that are split by channels."""
        self.reducer = Reducer(self.parameters(), mesh, axes, algorithm=plan.all_reduce)
        self.calls = 0
        self.updates = 0
        self.observe: Callable[[Any], None] | None = None
        """Is given the model's results in a step, where they are; `current_rows()` says of which images."""
        self.unreduced = False

    def step(self, image: Image, target: Any, *, reduce: bool = True, weight: float = 1.0) -> Tensor:
        """The loss of the whole batch, on every rank, after forward and backward. Collective.

        Gradients are added to `.grad` and averaged over the ranks. `reduce=False` leaves the averaging to a later
        step, which then sends once for all; `weight` is the part of this batch in what is accumulated.
        """
        with shared_fate(self.world_mesh.transport):
            return self._step(image, target, reduce, weight)

    def _step(self, image: Image, target: Any, reduce: bool, weight: float) -> Tensor:
        self.likeness.check("step", image=image, target=target)
        images, goal = self.inputs.images(image), self.inputs.target(target, image)
        check_filled(image)  # now that all ranks brought the same
        if self.world_mesh.world > 1 and any(p._backward_hooks for _, p in self.reducer.named):
            check_hooks(self.plain, self.hooks)
        self.calls += 1  # by steps alone: how many batches a validation has depends on the plan
        with ExitStack() as stack:
            # Checkpoints recompute batch norms in backward.
            stack.enter_context(batchnorm_scope(self.plan.norm_scope))
            with self.scope():
                output = self.module(*images)
                if self.observe is not None:
                    self.observe(output)
                loss = self.loss(output, goal)
                self.check_loss(loss)
            if self.looks_at_leaves():
                check_leaves(loss, (images, goal), self.parameters(), self.plain, self.loss)
            if reduce:
                stack.enter_context(self.reducer.watching())
            (loss * weight if weight != 1.0 else loss).backward()
        self.unreduced = not reduce
        if self.plan.norm_scope == "rank" and self.module.training:
            with torch.no_grad():
                average(self._buffers(), self.world_mesh, self.reducer.axes)
        self.world_mesh.transport.await_gpu("the step")
        return self.over_data(loss.detach())

    def __call__(self, image: Image) -> Any:
        """The model's result without gradients: a sharded tensor where it still has the image's dims. Collective.

        As in torch, `eval()` decides how BatchNorm and dropout behave.
        """
        transport = self.world_mesh.transport
        with shared_fate(transport), torch.no_grad(), self.scope(), transport.attentive("inference"):
            self.likeness.check("call", image=image)
            return self.module(*self.inputs.images(image))

    def evaluate(self, image: Image, target: Any) -> tuple[Any, Any, Tensor]:
        """The model's result, the target cut like it, and the loss of the whole batch; no gradients. Collective."""
        inputs = Inputs(self.plain, self.world_mesh, self.world_mesh)
        with shared_fate(self.world_mesh.transport), torch.no_grad(), self.scope():
            self.likeness.check("evaluate", image=image, target=target)
            images, goal = inputs.images(image), inputs.target(target, image)
            check_filled(image)
            output = self.module(*images)
            return output, goal, self.loss(output, goal)

    def from_last(self, value: Any) -> Any:
        """What was computed where the model's results are, on every rank. Collective."""
        return value

    def needs(self, training: bool) -> Needs:
        """What this rank takes of every batch, in training or in evaluation: what a loader has to read here."""
        return Needs(self.world_mesh)

    @contextmanager
    def scope(self) -> Generator[None]:
        """What holds while the model runs: this call's random numbers, precision, whose statistics BatchNorm takes."""
        device = self.device
        with ExitStack() as stack:
            stack.enter_context(generators_kept(device))
            seed_generators(self.draw(), device)
            if self.plan.precision == "bfloat16":
                stack.enter_context(torch.autocast(device.type, torch.bfloat16))
            stack.enter_context(batchnorm_scope(self.plan.norm_scope))
            if self.shares:
                stack.enter_context(Watch())
            yield
        make_plain(self.buffered)

    def draw(self) -> int:
        """The seed of this call: the same on all ranks that see the same images, whatever the plan."""
        part = self.world_mesh.coordinates["data"] if self.plan.average else 0
        code = hashlib.blake2b(f"{self.seed} {self.calls} {part}".encode(), digest_size=7).digest()
        return int.from_bytes(code, "big")

    def check_loss(self, loss: Any) -> None:
        """Raise unless the loss is one number."""
        if isinstance(loss, ShardedTensor) or not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise LayoutError(f"the loss has to be one number, but {self.loss} gave {shape}: reduce it, as by .mean()")

    def looks_at_leaves(self) -> bool:
        """Whether this step looks at the loss's graph: with several ranks the 1st, 2nd, 4th, …, as it takes time."""
        self.looks += 1
        return self.world_mesh.world > 1 and self.looks.bit_count() == 1

    def over_data(self, loss: Tensor) -> Tensor:
        """The mean of the data ranks' own losses, where each trains alone."""
        if self.plan.average and self.plan.data > 1:
            transport = self.world_mesh.transport
            loss = transport.outbound(loss.clone())
            work = dist.all_reduce(loss, group=transport.group, async_op=True)
            wait_for(work, transport, "the mean of losses")
            loss /= self.world_mesh.world
        return loss

    # -- gradients and updates ----------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Average what steps with `reduce=False` left. Collective; calling it again changes nothing."""
        settle(self.world_mesh.transport)
        if self.unreduced:
            with self.reducer.watching():
                pass
            self.unreduced = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole gradient, which is scaled down where it is larger than `max_norm`. Collective."""
        self.reduce_gradients()
        if self.shares:
            return clip_shared(list(self.parameters()), max_norm, norm_type)
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def found_inf(self) -> bool:
        """Whether any gradient on any rank is infinite or no number. Collective."""
        settle(self.world_mesh.transport)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return any_rank(self.world_mesh, not all(bool(g.isfinite().all()) for g in grads))[0]

    def updated(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """To be called after each `optimizer.step()`: averages the weights whenever the plan says so."""
        self.updates += 1
        if self.plan.average and self.updates % self.plan.average == 0:
            self.synchronise(optimizer)

    def synchronise(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Average weights, buffers and the optimizer's state where data ranks train alone. Collective."""
        if self.plan.average and self.plan.data > 1:
            state = [v for s in (optimizer.state.values() if optimizer else ()) for v in s.values()]
            tensors = [v for v in state if isinstance(v, Tensor)]
            with torch.no_grad():
                average([*self.parameters(), *self._buffers(), *tensors], self.world_mesh, ("data",))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.unreduced = False
        self.module.zero_grad(set_to_none)
        self.loss_terms.zero_grad(set_to_none)

    # -- the model's own names ----------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank holds, the loss's too."""
        return chain(self.module.parameters(), self.loss_terms.parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, under the names of the unsplit model; the loss's are `loss.*`."""
        return chain(self.plain.named_parameters(), self.loss_terms.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this rank holds, under the names of the unsplit model; the loss's are `loss.*`."""
        return chain(self.plain.named_buffers(), self.loss_terms.named_buffers())

    def _buffers(self) -> list[Tensor]:
        return [*self.module.buffers(), *self.loss_terms.buffers()]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((t.device for t in chain(self.module.parameters(), self.module.buffers())), torch.device("cpu"))

    @property
    def first_stage(self) -> int:
        """The first stage of the model that this rank holds."""
        return 0

    def actions(self) -> tuple[tuple[str, float, float], ...]:
        """What stages did in the last step on this rank: name, begin and end, of `time.perf_counter`."""
        return ()

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Parallel:
        """Set training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Parallel:
        """Set evaluation mode."""
        return self.train(False)

    def state_dict(self, rank0: bool = False) -> dict[str, Any]:
        """The unsplit model's state on the CPU, on every rank or, with `rank0`, on rank 0 alone. Collective.

        Parameters and buffers of the loss are in it as `loss.*`.
        """
        with self.loss_terms.attached():
            if self.shares:
                return joined_state(self.plain, wanted=not rank0 or self.world_mesh.rank == 0)
            if rank0 and self.world_mesh.rank != 0:
                return {}
            return {key: on_cpu(value) for key, value in self.plain.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, rank0: bool = False) -> _IncompatibleKeys:
        """Take over the unsplit model's state, as torch does; with `rank0`, the one that rank 0 gives. Collective.

        Missing and unexpected keys are returned as torch returns them, on every rank.
        """
        load = load_joined if self.shares else load_replicated
        with self.loss_terms.attached():
            return load(self.plain, state, self.world_mesh, strict, rank0)

    @contextmanager
    def whole_extra_states(self) -> Generator[None]:
        """A block in which every module's `get_extra_state` gives that of the unsplit model. Collective."""
        yield

    def __repr__(self) -> str:
        return f"Parallel({type(self.module).__name__}; {', '.join(str(self.plan).splitlines())}; {self.world_mesh})"
