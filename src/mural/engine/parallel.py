"""A model under a plan: it runs steps, and answers for the model as if it had never been divided."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.comm.failure.agree import any_rank
from mural.comm.failure.shared_fate import settle
from mural.comm.path_choice import rest_on_host
from mural.engine.channel_state import clip_shared
from mural.engine.division import Division
from mural.engine.held_model import HeldModel, Loss
from mural.engine.input_gradients import InputGradients, check_alone
from mural.engine.inputs import Image, Needs
from mural.engine.memory_room import grow_segments
from mural.engine.offloading import Offloading
from mural.engine.pipelined import Pipelined
from mural.engine.proof import Proof, Prover
from mural.engine.result_tiles import ResultSink
from mural.engine.streamed import Streamed
from mural.engine.unsplit import Unsplit
from mural.errors import PlanError
from mural.gradients.average import average
from mural.plans import Plan
from mural.ranks import Mesh


class Parallel(HeldModel):
    """A model under a plan: steps, inference, and the model's own names for what this rank holds.

    `way` is how a batch goes through the model: as a whole, in stages and micro-batches, or in tiles.
    """

    proof: Proof | None = None
    """What was proved before the first step, where a proof was asked for."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        loss: Loss,
        seed: int,
        division: Division,
        prover: Prover | None = None,
    ):
        super().__init__(model, plan, mesh, loss, seed, division)
        self.prover = prover
        if plan.memory and self.device.type == "cuda":
            if "activations" in plan.offload:
                rest_on_host(self.world_mesh.transport)
            # Ranks that share a GPU may hand memory on, which such segments do not allow.
            if "activations" in plan.offload or (mesh.world == 1 and (plan.offload or not plan.stream)):
                grow_segments()
        self.way = Streamed(self) if plan.stream else Pipelined(self) if plan.piped else Unsplit(self)
        self.offloading = Offloading.of(self) if plan.offload else None
        self.updates = 0
        self.unreduced = False

    def step(self, image: Image, target: Any, *, reduce: bool = True, weight: float = 1.0) -> Tensor:
        """The loss of the whole batch, on every rank, after forward and backward. Collective.

        Gradients are added to `.grad` and averaged over the ranks. `reduce=False` leaves the averaging to a later
        step, which then sends once for all; `weight` is the part of this batch in what is accumulated.
        """
        self.prove(image, target)
        check_alone(self, image, target)
        if isinstance(self.way, Unsplit):
            return self._step(image, target, reduce, weight)
        inputs = InputGradients(self, image, target)
        loss = self._step(inputs.image, inputs.target, reduce, weight)
        inputs.hand_back()
        return loss

    def _step(self, image: Image, target: Any, reduce: bool, weight: float) -> Tensor:
        kind = (image, target, reduce, self.training)
        with nullcontext() if self.offloading is None else self.offloading.step(*kind):
            loss = self.way.step(image, target, reduce, weight)
        self.unreduced = not reduce
        return loss

    def prove(self, image: Image, target: Any) -> Proof | None:
        """What is proved for batches such as this one, once, before the first step; None if nobody asked. Collective.

        Raises `ProofError` where the plan differs from one device.
        """
        if self.prover is not None:
            prover, self.prover = self.prover, None
            self.proof = prover.prove(self, image, target)
        return self.proof

    def __call__(self, image: Image, into: Any = None) -> Any:
        """The model's result without gradients: a sharded tensor where it still has the image's dims. Collective.

        As in torch, `eval()` decides how BatchNorm and dropout behave. The result of stages is on the ranks of the last
        one. On the others it has a shape and no piece; `full()` is collective over all ranks. A plan that streams
        can give the result away tile by tile: `into` is a `Sink` for each image, or one `ResultSink`.
        """
        if into is None:
            return self.way.call(image)
        if not isinstance(self.way, Streamed):
            raise PlanError("into=… is for plans that stream: set stream, or write the result yourself")
        return self.way.call(image, into)

    def evaluate(self, image: Image, target: Any) -> tuple[Any, Any, Tensor]:
        """The model's result, the target cut like it, and the loss of the whole batch; no gradients. Collective.

        Result and target are None on ranks that do not hold the last stage.
        """
        return self.way.evaluate(image, target)

    def evaluate_into(self, image: Image, target: Any, sink: ResultSink) -> Tensor:
        """The loss of the whole batch, while the sink takes result and target tile by tile. Collective."""
        if isinstance(self.way, Streamed):
            return self.way.evaluate_into(image, target, sink)
        raise PlanError("evaluate_into(…) is for plans that stream: evaluate(…) gives the whole result")

    def from_last(self, value: Any) -> Any:
        """What was computed where the model's results are, on every rank. Collective."""
        if self.stage_ranks.alone:
            return value
        told = [value]
        owner = self.stage_ranks.ranks(self.stage_ranks.schedule(1).seat_of[0, self.plan.stages - 1])[0]
        dist.broadcast_object_list(told, src=owner, group=self.world_mesh.transport.group)
        return told[0]

    def needs(self, training: bool, number: int = 0) -> Needs:
        """What this rank takes of every batch, in training or in evaluation: what a loader has to read here.

        Where the model has several inputs, `number` says of which.
        """
        return self.way.needs(training, number)

    def actions(self) -> tuple[tuple[str, float, float], ...]:
        """What stages did in the last step on this rank: name, begin and end, of `time.perf_counter`."""
        return tuple((str(action), begin, end) for action, begin, end in self.way.spans)

    # -- gradients and updates ----------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Reduce the gradients that steps with `reduce=False` left. Collective; calling it again changes nothing."""
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
        if self.stage_ranks.alone:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return self._clip_stages(max_norm, norm_type)

    def _clip_stages(self, max_norm: float, norm_type: float) -> Tensor:
        """The same where ranks hold different parameters: each counts where its first holder is."""
        rank, transport = self.world_mesh.rank, self.world_mesh.transport
        held = [(self.division.holders[name], p.grad) for name, p in self.named_parameters() if p.grad is not None]
        own = [grad for ranks, grad in held if ranks[0] == rank]
        mine = nn.utils.get_total_norm(own, norm_type).double().cpu() if own else torch.zeros((), dtype=torch.float64)
        power = norm_type != float("inf")
        total = transport.outbound((mine**norm_type if power else mine).view(1))
        with transport.meeting("norm"):
            dist.all_reduce(total, op=dist.ReduceOp.SUM if power else dist.ReduceOp.MAX, group=transport.group)
        norm = total[0] ** (1 / norm_type) if power else total[0]
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, grad in held:
            grad.mul_(scale.to(grad.device, grad.dtype))
        return norm.to(self.device)

    def found_inf(self) -> bool:
        """Whether any gradient on any rank is infinite or not a number. Collective."""
        settle(self.world_mesh.transport)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return any_rank(self.world_mesh, not all(bool(g.isfinite().all()) for g in grads))[0]

    def updated(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """To be called after each `optimizer.step()`: averages the weights whenever the plan says so."""
        self.updates += 1
        if self.span.every and self.updates % self.span.every == 0:
            self.synchronise(optimizer)

    def synchronise(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Average weights, buffers and the optimizer's state where data ranks train alone. Collective."""
        if self.span.parts > 1:
            state = [v for s in (optimizer.state.values() if optimizer else ()) for v in s.values()]
            tensors, buffers = [v for v in state if isinstance(v, Tensor)], [b for _, b in self.named_buffers()]
            with torch.no_grad():
                average([*self.parameters(), *buffers, *tensors], self.world_mesh, ("data",))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.unreduced = False
        self.module.zero_grad(set_to_none)
        self.loss_terms.zero_grad(set_to_none)

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

    def __repr__(self) -> str:
        return f"Parallel({type(self.module).__name__}; {', '.join(str(self.plan).splitlines())}; {self.world_mesh})"
