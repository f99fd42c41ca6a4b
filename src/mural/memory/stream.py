"""Streaming: a step over an image in tiles, with the gradients of the whole image.

Forward goes through the passes in order, tile by tile, and measures totals. Backward goes through them in reverse: each
tile is computed again with gradients, from those of what its pass made to those of what its pass read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from mural.graph.nodes import Node, Place
from mural.memory.passes import StreamPass, TotalKey
from mural.memory.sweeps import Sweep, sweeps_of
from mural.memory.tile_function import TileFunction, TileGiven, TileMade, gradients_of
from mural.memory.tile_sweeps import TileSweeps
from mural.memory.tile_task import Chunk, Coordinates, TileTask
from mural.memory.whole_pass import WholePass
from mural.ranks import SPATIAL


class Streamer(TileSweeps):
    """Runs the passes of one step."""

    @property
    def whole(self) -> WholePass:
        """Runs the passes on whole tensors."""
        return WholePass(self, self.cuts)

    def step(self, weight: float = 1.0) -> Tensor:
        """The loss; gradients are in `sums` (of this rank's tiles) and `shared` (the same on all ranks)."""
        *others, last = self.passes.passes
        self.coming = deque(sweeps_of(self.passes, self.joins, in_one=bool(weight) and not last.keeps))
        self._begin()
        for one in others:
            self.run(one)
        if others:
            self.do_meanwhile()
        loss = self._last(last, weight)
        for one in reversed(others):
            if not self.joins.skips(one):
                self.run_backward(one)
        self.do_meanwhile()
        self.learn()
        return loss

    def _begin(self) -> None:
        """There is no first tile to wait for where the first pass runs on whole tensors."""
        if self.passes.passes[0].whole:
            self.do_meanwhile()

    @property
    def loss_place(self) -> Place:
        """Where the loss is: the first result."""
        first = self.needs.graph.graph.outputs[0]
        return first.source, first.pick

    def infer(self) -> dict[Place, Tensor]:
        """All results that are no tiles, after all passes without gradients; tiles are kept, or delivered."""
        self._begin()
        passes = self.passes.passes
        self.coming = deque(Sweep(one, "forward") for one in passes)
        for number, one in enumerate(passes):
            self.run(one)
            later = {place for other in passes[number + 1 :] for place in other.reads}
            for place in set(one.reads) - later - self.results:
                if place in self.kept:
                    self.kept.pop(place).drop()
        self.do_meanwhile()
        self.learn()
        _, task = self._tail_task(grad=False)
        with torch.no_grad():
            task.run()
        return dict(task.kept)

    def run(self, one: StreamPass) -> None:
        """One pass forward."""
        if one.whole:
            self.whole.forward(one)
        else:
            self.forward(one)

    def run_backward(self, one: StreamPass) -> None:
        """One pass backward."""
        join = self.joins.of(one)
        if one.whole:
            self.whole.backward(one)
        elif join is not None:
            self.backward_of_both(join)
        else:
            self.backward(one)
        self.end_backward(one)

    def _last(self, last: StreamPass, weight: float) -> Tensor:
        """The last pass, forward and backward."""
        if last.whole and any(self.loss_place in call.node.makes for call in last.calls):
            loss = self.whole.finish(last, weight)
            self.end_backward(last)
            return loss
        # A weight of 0 leaves nothing to scale by.
        if weight and not last.whole and not last.keeps and (loss := self._in_one(last, weight)) is not None:
            return loss
        self.coming = deque(sweeps_of(self.passes, self.joins, in_one=False))
        self.run(last)
        loss, adjoints = self._tail(weight)
        self._add_adjoints(adjoints)
        self.run_backward(last)
        return loss

    def _in_one(self, last: StreamPass, weight: float) -> Tensor | None:
        """Forward and backward of the last pass in one, where its only total with a gradient is one number.

        Its gradient is guessed, and all gradients are scaled in the end: they are proportional to it. If the pass is
        joined to the one before it, that sweep finds the gradients of what the other one measured, and a second one
        all others.
        """
        join = self.joins.of(last)
        of, name = (None, "backward") if join is None else (join.before.measures, "adjoints")
        sums: dict[tuple[TotalKey, Chunk], Tensor] = {}
        root: tuple[TotalKey, Tensor] | None = None
        for at in self._told(last, f"forward and {name}"):
            given, tile = self.given(last, at, True, of), self.tile(last, at)
            if root is None and (root := self.guesses.get(key := given.form)) is None:
                if (found := self._first_in_one(tile, given)) is None:
                    return None
                root, made = found
                self.guesses[key] = root
            elif sums and self._adds_nothing(last, given):  # the first tile counts: totals are of something
                continue
            else:
                made = self.compute(tile, replace(given, adjoints={(root[0], None): root[1]}))
            self.collect(at, made, sums, {})
            self.add_gradients(last, at, made)
        if join is None:
            self.end_backward(last)
        self.settle(sums, {})
        loss, adjoints = self._tail(weight)
        if root is not None:
            single, guess = root
            true = adjoints.get((single, None), torch.zeros_like(guess))
            self._rescale(true * prod(map(self.mesh.size, self.totals.axes[single])) / guess)
            adjoints = {at: grad for at, grad in adjoints.items() if join is not None or at != (single, None)}
        self._add_adjoints(adjoints)
        if join is not None:
            self.complete(last)
            self.backward_joined(join)
            self.end_backward(last)
        return loss

    def _first_in_one(self, tile: TileFunction, given: TileGiven) -> tuple[tuple[TotalKey, Tensor], TileMade] | None:
        """The only total of the last pass with a gradient, the guess for it, and what the first tile gives with it."""
        given = given.with_leaves()
        task = tile.run(given)
        found = [key for key, part in task.sums.items() if part.requires_grad]
        if task.moments or len(found) != 1:
            return None
        single, part = found[0], task.sums[found[0]]
        if part.numel() != 1 or part.is_complex() or task.chunk(single) is not None:
            return None  # several numbers; or each image has a total of its own
        guess = self._guess(single, part)
        return (single, guess), tile.made(replace(given, adjoints={(single, None): guess}), task)

    def _adds_nothing(self, last: StreamPass, given: TileGiven) -> bool:
        """Whether a tile adds nothing to loss and gradients: its targets are all of the class that the loss ignores."""
        calls = list(last.measured_calls)
        node = self.passes.graph.calls[calls[0]].node
        ignored = ignored_class(node)
        if len(calls) != 1 or ignored is None or len(node.reads) < 2:
            return False
        target = given.windows.get(node.reads[1])
        return target is not None and not target.is_meta and bool((target == ignored).all())

    def _guess(self, key: TotalKey, part: Tensor) -> Tensor:
        """One over the number of positions: the gradient of a mean."""
        shape = self.passes.graph.calls[key[0]].node.input_shapes[0]
        positions = prod(shape) / (max(1, shape[1]) if len(shape) > 2 else 1)
        return torch.full_like(part.detach(), 1 / max(1.0, positions))

    def _rescale(self, factor: Tensor) -> None:
        """Scale all gradients that tiles have found so far."""
        if bool((factor == 1).all()):
            return
        for grad in self.sums.found.values():
            grad.mul_(factor.to(grad.dtype).reshape(()))
        for kept in (*self.kept.values(), *self.inputs.values()):
            kept.rescale(factor.reshape(()))
        for at, adjoint in self.totals.adjoints.items():
            self.totals.adjoints[at] = adjoint * factor.reshape(())

    def _add_adjoints(self, adjoints: Mapping[tuple[TotalKey, Chunk], Tensor]) -> None:
        for (key, chunk), adjoint in adjoints.items():
            self.totals.add_adjoint(key, chunk, adjoint)

    def _tail(self, weight: float) -> tuple[Tensor, dict[tuple[TotalKey, Chunk], Tensor]]:
        """The loss from the totals, and its gradients with respect to them."""
        known, task = self._tail_task(grad=True)
        with torch.enable_grad():
            task.run()
        loss = task.kept[self.loss_place]
        leaves = {k: v for k, v in known.items() if v.requires_grad}
        roots = [(loss, torch.full_like(loss, weight))] if loss.requires_grad else []
        of_known, of_held = gradients_of(roots, leaves, self.parameters_of(task.one))
        for name, grad in of_held.items():
            self.add_shared(name, grad)
        return loss.detach(), {(key, chunk): grad / self._copies(key) for (key, chunk), grad in of_known.items()}

    def add_shared(self, name: str, grad: Tensor) -> None:
        """Add a gradient that has the scale of sharded tensors: its mean over the ranks is the true one."""
        held = self.shared.get(name)
        # A copy: two parameters may have one gradient, and it may be expanded.
        self.shared[name] = grad.clone() if held is None else held + grad

    def _copies(self, key: TotalKey) -> int:
        """How many ranks find the same gradient for a total, of which each takes its part.

        Ranks along the total's axes add their parts up; others compute the same and go on with a part each.
        """
        return prod(map(self.mesh.size, {*self.totals.axes[key], *SPATIAL}))

    def _tail_task(self, grad: bool) -> tuple[dict[tuple[TotalKey, Chunk], Tensor], TileTask]:
        made = {place for call in self.passes.tail for place in call.node.makes}
        ends = tuple(p for p in self.results if p in made and not any(self.needs.graph.values[p].axes))
        one = StreamPass(-1, self.passes.tail, (), ends, (), ())
        at: Coordinates = {"data": self.needs.grid.first["data"]} if "data" in self.needs.grid.first else {}
        known = {
            k: v.detach().requires_grad_(grad and k[0] in self.totals.differentiable)
            for k, v in self.totals.values.items()
        }
        task = TileTask(one, at, self.needs, {}, self.held, known, self.totals.axes, self.before_random, self.device)
        return known, task


def ignored_class(node: Node) -> int | None:
    """The class that a call of a loss ignores; None for other calls, and for a number that no mask has."""
    if node.op not in ("cross_entropy", "nll_loss"):
        return None
    found = node.kwargs.get("ignore_index", node.args[4] if len(node.args) > 4 else -100)
    return found if isinstance(found, int) and found >= 0 else None
