"""One pass of a batch through the stages: what each stage takes of it, and what happens after the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.engine.inputs import Image, Inputs
from mural.engine.microbatches import part_of
from mural.errors import PlanError
from mural.graph.script import Key
from mural.pipeline.loss_parts import Dims, carriers, gradients, joined_results, loss_weights, undivided
from mural.pipeline.runner import Ends
from mural.pipeline.stage import Stage
from mural.shard import ShardedTensor
from mural.shard.generators import generators_kept, seed_generators
from mural.shard.in_time import Rows, batch_dim, lifted, lowered, rows_of_batch

Loss = Callable[[Any, Any], Tensor]


class BatchPass:
    """The micro-batches of one batch, without gradients: collects the results of the last stage."""

    def __init__(self, inputs: Inputs, image: Image, rows: Sequence[Rows], stages: Mapping[tuple[int, int], Stage]):
        self.data, self.image, self.every, self.stages = inputs, image, rows, stages
        self.results: dict[int, Any] = {}
        self.dims: Dims = ()

    @property
    def microbatches(self) -> int:
        """How many micro-batches follow each other."""
        return len(self.every)

    def stage(self, replica: int, stage: int) -> Stage:
        """A stage of a replica on this rank."""
        return self.stages[replica, stage]

    def inputs(self, stage: int, microbatch: int) -> Mapping[Key, Tensor]:
        """What a stage takes of the model's inputs: pieces of the whole batch, of which this is one."""
        takes = next(found for (_, at), found in self.stages.items() if at == stage).part.takes
        wanted = [key for key in takes if isinstance(key[0], str)]
        if not wanted:
            return {}
        given = part_of(self.image, self.every[microbatch])
        names = self.names or tuple(name for name, _ in wanted)
        numbers = {key: names.index(str(key[0])) for key in wanted}
        return {key: lifted(self.data.one_of(given, n), microbatch, self.every) for key, n in numbers.items()}

    names: tuple[str, ...] = ()
    """The names of the model's inputs, where its stages know them."""

    def arrived(self, microbatch: int, result: Any) -> None:
        """Take the model's result for a micro-batch."""
        self.results[microbatch] = self._own(result)

    def _own(self, result: Any) -> Any:
        """The result of a micro-batch as that of a batch of its own."""
        check_result(result)
        self.dims = tuple(batch_dim(leaf) for leaf in pytree.tree_leaves(result))
        return pytree.tree_map_only(Tensor, lowered, result)

    def ends(self, microbatch: int, result: Any) -> Ends:
        """Nothing to begin a backward with."""
        return []

    def joined(self) -> Any:
        """The results of all micro-batches, as of one batch."""
        return joined_results([self.results[m] for m in sorted(self.results)], self.dims)


def check_result(result: Any) -> None:
    """Raise for a result that may contain tensors that cannot be seen."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) or not any(isinstance(v, Tensor) for v in getattr(leaf, "__dict__", {}).values()):
            continue
        raise PlanError(
            f"the model returns a {type(leaf).__name__}, whose tensors cannot be seen: return tensors, or tuples, "
            f"lists and dicts of them, or register the class by torch.utils._pytree.register_pytree_node"
        )


class Training(BatchPass):
    """The same, with the loss after the last stage.

    `whole` says that all results are there before the first backward; the loss is then computed from all of them.
    """

    def __init__(
        self,
        batch: BatchPass,
        target: Any,
        loss: Loss,
        weight: float,
        whole: bool,
        observe: Callable[[Any], None] | None = None,
    ):
        super().__init__(batch.data, batch.image, batch.every, batch.stages)
        self.names = batch.names
        self.observe = observe
        self.target, self.loss, self.weight, self.whole = target, loss, weight, whole  # `loss` runs in the plan's scope
        self.losses: list[Tensor] = []
        self.weights: list[float] | None = None
        self.seeds: dict[int, list[Tensor | None]] = {}
        self.targets: dict[int, Any] = {}
        """The targets of micro-batches that were read before their backward."""

    def arrived(self, microbatch: int, result: Any) -> None:
        """Keep what the loss of the whole batch needs, or what the parts of the loss are weighed with."""
        own = self._own(result)
        if self.observe is not None:
            with rows_of_batch(self.every[microbatch]):
                self.observe(own)
        if self.whole:
            self.results[microbatch] = pytree.tree_map_only(Tensor, cut_off, own)
        elif self.weights is None:
            self.weights = self._weigh(own, self.every[microbatch].count)

    def _weigh(self, result: Any, count: int) -> list[float]:
        """The weights of the micro-batches, found with random results like this one of some images."""
        if len(self.every) == 1:
            return [1.0]
        leaves, form = pytree.tree_flatten(result)
        likes = [
            form.unflatten([for_images(x, d, count, rows.count) for x, d in zip(leaves, self.dims, strict=True)])
            for rows in self.every
        ]
        self.targets = {m: self._target(m) for m in range(len(self.every))}
        with generators_kept(self.data.device), torch.enable_grad():
            seed_generators(0, self.data.device)  # the same trial results on all ranks of the stage
            whole = self.data.target(self.target, self.image)
            return loss_weights(self.loss, likes, [*self.targets.values()], whole, self.data.mesh, self.dims)

    def _target(self, microbatch: int) -> Any:
        if microbatch in self.targets:
            return self.targets.pop(microbatch)
        rows = self.every[microbatch]
        return self.data.target(part_of(self.target, rows), part_of(self.image, rows))

    def ends(self, microbatch: int, result: Any) -> Ends:
        """Where the backward of a micro-batch begins: at its loss, or at what the batch's loss gave its result."""
        if self.whole:
            if not self.seeds:
                self._all_at_once()
            pairs = zip(carriers(result), self.seeds.pop(microbatch), strict=True)
            return [(carrier, seed) for carrier, seed in pairs if carrier.requires_grad and seed is not None]
        share, own = (self.weights or [1.0])[microbatch], self._own(result)
        if share == 0.0:
            self._check_empty(own, microbatch)
            return [(c, torch.zeros_like(c)) for c in carriers(result) if c.requires_grad]
        loss = self.loss(own, self._target(microbatch)) * share
        self.losses.append(loss.detach())
        return [(loss * self.weight if self.weight != 1.0 else loss, None)]

    def _check_empty(self, result: Any, microbatch: int) -> None:
        """Raise where a micro-batch contributes nothing to the loss for trial results, but does for its own."""
        trial = pytree.tree_map_only(Tensor, cut_off, result)
        loss = self.loss(trial, self._target(microbatch))
        (grads,) = gradients(loss, [trial], self.data.mesh)
        if any(bool((grad.isfinite() & (grad != 0)).any()) for grad in grads):
            raise undivided(f"micro-batch {microbatch} adds nothing to it for trial results, but does for its own")

    def _all_at_once(self) -> None:
        """The loss of all results, and the gradients that it has for each; parameters that it reads get theirs too."""
        order = sorted(self.results)
        loss = self.loss(self.joined(), self.data.target(self.target, self.image))
        self.losses.append(loss.detach())
        if loss.requires_grad:
            (loss * self.weight if self.weight != 1.0 else loss).backward()
        for m in order:
            self.seeds[m] = [carrier.grad for carrier in carriers(self.results[m])]
        self.results.clear()

    def total(self) -> Tensor | None:
        """The loss of the batch, on the ranks of the last stage, as far as it was computed here."""
        return torch.stack([loss.double() for loss in self.losses]).sum() if self.losses else None


def cut_off(value: Tensor) -> Tensor:
    """The same values as the beginning of another history."""
    if not value.is_floating_point():
        return value
    if isinstance(value, ShardedTensor):
        return ShardedTensor(value.local.detach().requires_grad_(), value.placement, "", value.folds)
    return value.detach().requires_grad_()


def for_images(value: Any, dim: int | None, have: int, want: int) -> Any:
    """A tensor like a result for some images, for another number of them; `dim` is where it has them."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if dim is None or have == want or value.shape[dim] % have:
        return value
    each = value.shape[dim] // have
    return torch.cat([value] * -(-want // have), dim).narrow(dim, 0, each * want)
