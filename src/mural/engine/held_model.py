"""A model of which this rank holds a part: its own names for what is here, and the state of the whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from mural.channel.share import shares_among
from mural.comm.failure.shared_fate import shared_fate
from mural.engine.channel_state import joined_state, load_joined
from mural.engine.division import Division, Holders, release
from mural.engine.extra_state import extra_of_owners, load_replicated, on_cpu
from mural.engine.inputs import Inputs
from mural.engine.loss_terms import LossTerms
from mural.engine.materialize import unwrapped
from mural.engine.same_inputs import SameInputs
from mural.engine.step_span import StepSpan
from mural.engine.whole_state import WholeState
from mural.errors import LayoutError
from mural.gradients.average import average, average_over
from mural.gradients.reducer import GradientSums, Reducer
from mural.plans import Plan
from mural.ranks import Mesh
from mural.shard import ShardedTensor

Loss = Callable[[Any, Any], Tensor]


class HeldModel:
    """The model and its loss under a plan, as far as this rank holds them.

    `calls` counts the steps begun; with the seed it decides what random layers draw, so a resumed run sets it.
    """

    observe: Callable[[Any], None] | None = None
    """Is given the model's results in a step, where they are; `current_rows()` says of which images. Where images are
    streamed, it is given each `ResultTile` of them."""
    progress: Callable[[int, int, str], None] | None = None
    """Is told, on every rank that streams, how many tiles of a pass over the images are done, of how many, and what the
    pass is called: `progress(37, 256, "backward")`."""
    calls = 0
    looks = 0
    """How many steps have asked whether to look at the leaves of the loss's graph."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, loss: Loss, seed: int, division: Division):
        self.module, self.plan, self.world_mesh, self.loss, self.seed = model, plan, mesh, loss, seed
        self.plain = unwrapped(model)
        self.buffered = tuple(module for module in self.plain.modules() if module._buffers)
        self.hooks: dict[int, Any] = {}
        """The hooks on parameters that were looked at."""
        self.loss_terms = LossTerms.of(loss, self.plain)
        """The loss's own parameters and buffers, `loss.*` among the model's names."""
        self.loss_terms.settle(self.device, mesh)
        self.division, self.stage_ranks = division.with_loss(self.loss_terms), division.stage_ranks
        self.span = StepSpan.of(plan, self.stage_ranks.mesh)
        self.mesh = self.span.mesh
        self.inputs, self.same_inputs = Inputs(self.plain, self.mesh, self.stage_ranks.mesh), SameInputs(mesh)
        self.shares = shares_among(model.parameters())
        """What this rank holds of parameters that are split by channels."""
        self.holders = Holders(self.division, mesh)
        release(self.plain, division)
        self.reducer = self._sums()

    def _sums(self) -> GradientSums:
        """How gradients are added up over the ranks that hold the same parameters."""
        named, algorithm = dict(self.named_parameters()), self.plan.all_reduce
        if self.stage_ranks.alone:
            return Reducer(named, self.world_mesh, self.span.axes, algorithm=algorithm)
        sets = self.holders.sets(named.items(), 1 / self.mesh.replicas)
        return GradientSums(sets, self.world_mesh, algorithm=algorithm)

    # -- names --------------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank holds, the loss's too."""
        return (p for _, p in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, under the names of the unsplit model; the loss's are `loss.*`."""
        named = chain(self.plain.named_parameters(), self.loss_terms.named_parameters())
        return ((name, p) for name, p in named if self.division.holds(name))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this rank holds, under the names of the unsplit model; the loss's are `loss.*`."""
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
        return min(self.stage_ranks.stages_here())

    # -- states -------------------------------------------------------------------------------------------------------

    def state_dict(self, rank0: bool = False) -> dict[str, Any]:
        """The unsplit model's state on the CPU, on every rank or, with `rank0`, on rank 0 alone. Collective.

        Parameters and buffers of the loss are in it as `loss.*`.
        """
        wanted = not rank0 or self.world_mesh.rank == 0
        with self.loss_terms.attached():
            if not self.stage_ranks.alone:
                with shared_fate(self.world_mesh.transport):
                    return WholeState(self.plain, self.division, self.world_mesh).gathered(rank0)
            if self.shares:
                return joined_state(self.plain, wanted=wanted)
            return {key: on_cpu(value) for key, value in self.plain.state_dict().items()} if wanted else {}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, rank0: bool = False) -> _IncompatibleKeys:
        """Take over the unsplit model's state, as torch does; with `rank0`, the one that rank 0 gives. Collective.

        Missing and unexpected keys are returned as torch returns them, on every rank.
        """
        with self.loss_terms.attached():
            if not self.stage_ranks.alone:
                return WholeState(self.plain, self.division, self.world_mesh).load(state, strict, rank0)
            load = load_joined if self.shares else load_replicated
            return load(self.plain, state, self.world_mesh, strict, rank0)

    @contextmanager
    def whole_extra_states(self) -> Generator[None]:
        """A block in which every module's `get_extra_state` gives that of the unsplit model. Collective."""
        if self.stage_ranks.alone:
            yield
            return
        with self.loss_terms.attached(), extra_of_owners(self.plain, self.world_mesh, self.division.keeper):
            yield

    # -- steps --------------------------------------------------------------------------------------------------------

    def draw(self) -> int:
        """The seed of this call: the same on all ranks that see the same images, whatever the plan."""
        text = f"{self.seed} {self.calls} {self.span.part}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    @torch.no_grad()
    def average_statistics(self) -> None:
        """Make running statistics their mean over the ranks, where each normalized by its own. Collective."""
        if self.plan.norm_scope != "rank" or not self.plain.training:
            return
        if self.stage_ranks.alone:
            average([b for _, b in self.named_buffers()], self.world_mesh, self.span.axes)
            return
        for each in self.holders.sets(self.named_buffers(), 1.0):
            if each.group is not None:
                with self.world_mesh.transport.meeting("statistics", each.group):
                    average_over([b for _, b in each.named if b.is_floating_point()], each.group, None)

    def check_loss(self, loss: Any) -> None:
        """Raise unless the loss is one number."""
        if isinstance(loss, ShardedTensor) or not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise LayoutError(f"the loss has to be one number, but {self.loss} gave {shape}: reduce it, as by .mean()")

    def looks_at_leaves(self) -> bool:
        """Whether this step looks at the loss's graph: with several ranks the 1st, 2nd, 4th, …, as it takes time."""
        self.looks += 1
        return self.world_mesh.world > 1 and self.looks.bit_count() == 1
