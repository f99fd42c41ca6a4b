"""One passage of a batch through the stages: what each stage takes of it, and what happens behind the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.engine.inputs import Image, Inputs
from mural.engine.microbatches import part_of
from mural.graph.replay import Key
from mural.pipeline.instance import Stage
from mural.pipeline.lossparts import carriers, gradients, joined_results, loss_weights, undivided
from mural.pipeline.runner import Ends
from mural.shard import ShardedTensor
from mural.shard.rows import Rows, rows_of_batch

Loss = Callable[[Any, Any], Tensor]


class Passage:
    """The micro-batches of one batch, without gradients: collects the results of the last stage."""

    def __init__(
        self, inputs: Inputs, image: Image, rows: Sequence[Rows], stages: Mapping[tuple[int, int, int], Stage]
    ):
        self.data, self.image, self.every, self.stages = inputs, image, rows, stages
        self.results: dict[int, Any] = {}

    def rows(self, microbatch: int) -> Rows:
        """The images of a micro-batch."""
        return self.every[microbatch]

    def stage(self, replica: int, stage: int, microbatch: int) -> Stage:
        """The stage that works on a micro-batch."""
        return self.stages[replica, stage, self.rows(microbatch).count]

    def inputs(self, stage: int, microbatch: int) -> Mapping[Key, Tensor]:
        """What a stage takes of the model's inputs."""
        replay = next(
            s for (_, at, n), s in self.stages.items() if (at, n) == (stage, self.rows(microbatch).count)
        ).replay
        names = [value.name for value in replay.graph.inputs]
        if not any((name, 0) in replay.stretch.takes for name in names):
            return {}
        given = self.data.images(part_of(self.image, self.rows(microbatch)))
        return {(n, 0): x for n, x in zip(names, given, strict=True) if (n, 0) in replay.stretch.takes}

    def arrived(self, microbatch: int, result: Any) -> None:
        """Take the model's result for a micro-batch."""
        self.results[microbatch] = result

    def ends(self, microbatch: int, result: Any) -> Ends:
        """Nothing to begin a backward with."""
        return []

    def joined(self) -> Any:
        """The results of all micro-batches, as of one batch."""
        return joined_results([self.results[m] for m in sorted(self.results)])


class Training(Passage):
    """The same with the loss behind the last stage.

    `whole` says that all results are there before the first backward begins; then the loss is computed from all.
    """

    def __init__(
        self,
        passage: Passage,
        target: Any,
        loss: Loss,
        weight: float,
        whole: bool,
        observe: Callable[[Any], None] | None = None,
    ):
        super().__init__(passage.data, passage.image, passage.every, passage.stages)
        self.observe = observe
        self.target, self.loss, self.weight, self.whole = target, loss, weight, whole  # `loss` runs in the plan's scope
        self.losses: list[Tensor] = []
        self.weights: list[float] | None = None
        self.seeds: dict[int, list[Tensor | None]] = {}

    def arrived(self, microbatch: int, result: Any) -> None:
        """Keep what the loss of the whole batch needs, or what the parts of the loss are weighed with."""
        if self.observe is not None:
            with rows_of_batch(self.rows(microbatch)):
                self.observe(result)
        if self.whole:
            self.results[microbatch] = pytree.tree_map_only(Tensor, cut_off, result)
        elif self.weights is None:
            self.weights = self._weigh(result, self.rows(microbatch).count)

    def _weigh(self, result: Any, count: int) -> list[float]:
        """The weights of the micro-batches, found with random results like this one of some images."""
        if len(self.every) == 1:
            return [1.0]
        likes = [
            pytree.tree_map_only(Tensor, lambda x, n=rows.count: for_images(x, count, n), result) for rows in self.every
        ]
        targets = [self._target(part) for part in self.every]
        cuda = [self.data.device] if self.data.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), torch.enable_grad():
            torch.manual_seed(0)  # the same trial results on all ranks of the stage
            return loss_weights(self.loss, likes, targets, self.data.target(self.target, self.image), self.data.mesh)

    def _target(self, rows: Rows) -> Any:
        return self.data.target(part_of(self.target, rows), part_of(self.image, rows))

    def ends(self, microbatch: int, result: Any) -> Ends:
        """Where the backward of a micro-batch begins: at its loss, or at what the batch's loss gave its result."""
        if self.whole:
            if not self.seeds:
                self._all_at_once()
            pairs = zip(carriers(result), self.seeds.pop(microbatch), strict=True)
            return [(carrier, seed) for carrier, seed in pairs if carrier.requires_grad and seed is not None]
        share = (self.weights or [1.0])[microbatch]
        if share == 0.0:
            self._check_empty(result, microbatch)
            return [(c, torch.zeros_like(c)) for c in carriers(result) if c.requires_grad]
        loss = self.loss(result, self._target(self.every[microbatch])) * share
        self.losses.append(loss.detach())
        return [(loss * self.weight if self.weight != 1.0 else loss, None)]

    def _check_empty(self, result: Any, microbatch: int) -> None:
        """Raise where a micro-batch that has no part in the loss for trial results has one for its own."""
        trial = pytree.tree_map_only(Tensor, cut_off, result)
        loss = self.loss(trial, self._target(self.every[microbatch]))
        (grads,) = gradients(loss, [trial], self.data.mesh)
        if any(bool((grad.isfinite() & (grad != 0)).any()) for grad in grads):
            raise undivided(f"micro-batch {microbatch} has no part in it for trial results, but one for its own")

    def _all_at_once(self) -> None:
        """The loss of all results, and the gradients that it has for each."""
        order = sorted(self.results)
        loss = self.loss(self.joined(), self.data.target(self.target, self.image))
        self.losses.append(loss.detach())
        lists = [carriers(self.results[m]) for m in order]
        every = [c for part in lists for c in part]
        grads: Iterator[Any] = iter(torch.autograd.grad(loss * self.weight, every, allow_unused=True))
        for m, part in zip(order, lists, strict=True):
            self.seeds[m] = [next(grads) for _ in part]
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


def for_images(value: Tensor, have: int, want: int) -> Tensor:
    """A tensor like a result for some images, for another number of them."""
    value = value.detach()
    if not value.ndim or value.shape[0] % have or have == want:
        return value
    return torch.cat([value] * -(-want // have))[: value.shape[0] // have * want]
