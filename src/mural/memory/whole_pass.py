"""Passes on whole tensors: what cannot run on tiles, or need not, runs once, on sharded tensors of the run's mesh."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mural.geometry import Box, Cuts, Interval
from mural.graph.nodes import Place
from mural.memory.passes import StreamPass
from mural.memory.tile_calls import Axes, as_in_model, made_by
from mural.memory.tile_function import gradients_of
from mural.ranks import SPATIAL
from mural.shard.gradient_scale import true_gradient
from mural.shard.layout import Layout
from mural.shard.relayout import pull
from mural.shard.tensor import ShardedTensor

if TYPE_CHECKING:
    from mural.memory.stream import Streamer


class WholePass:
    """Runs the passes on whole tensors of one step.

    Gradients inside have the scale of sharded tensors; those of kept values and of windows have their true scale.
    """

    def __init__(self, streamer: Streamer, cuts: Mapping[str, Cuts]):
        self.streamer, self.cuts = streamer, dict(cuts)
        self.images = tuple(sorted(self.cuts.items()))

    def forward(self, one: StreamPass) -> None:
        """Run the calls without gradients, and keep what later passes read."""
        with torch.no_grad():
            values, _ = self._run(one, grad=False)
            for place in one.keeps:
                made = values[place]
                if self.streamer.deliver is not None and place in self.streamer.results and any(self._axes(place)):
                    self.streamer.deliver(made, values)
                self.streamer.store(place).write(self.streamer.needs.region_box(place), self._region(place, made))

    def backward(self, one: StreamPass) -> None:
        """Run the calls again, from the gradients of what they made to those of what they read."""
        with torch.enable_grad(), self._unchanged(one):
            values, leaves = self._run(one, grad=True)
            roots: list[tuple[Tensor, Tensor]] = []
            for place in one.keeps:
                grad = self.streamer.kept[place].gradient(self.streamer.needs.region_box(place))
                if grad is None or place not in self.streamer.graded:
                    continue
                made = self._region(place, values[place])
                if made.requires_grad:
                    roots.append((made, grad * self.streamer.mesh.replicas))
        self._differentiate(one, roots, leaves)

    def finish(self, one: StreamPass, weight: float) -> Tensor:
        """The loss, which the last pass computes, forward and backward in one."""
        with torch.enable_grad():
            values, leaves = self._run(one, grad=True)
            loss: Tensor = values[self.streamer.loss_place]
        if loss.requires_grad:
            self._differentiate(one, [(loss, torch.full_like(loss, weight))], leaves)
        return loss.detach()

    @contextmanager
    def _unchanged(self, one: StreamPass) -> Generator[None]:
        """A block after which buffers are as before: norms have learned in forward what they compute again here."""
        names = {s for call in one.calls for s in call.node.writes if isinstance(s, str) and s in self.streamer.held}
        before = {name: self.streamer.held[name].clone() for name in names}
        yield
        for name, values in before.items():
            self.streamer.held[name].data.copy_(values)

    def _run(self, one: StreamPass, grad: bool) -> tuple[dict[Place, Any], dict[Place, Tensor]]:
        streamer = self.streamer
        values: dict[Place, Any] = {}
        leaves: dict[Place, Tensor] = {}
        kept: dict[Place, Any] = {}  # copies of what later calls write to
        for place in one.reads:
            box = self._own(place)
            source = streamer.source(place)
            images = one_by_one(box) if self._axes(place) else [box]
            source.plan(images)
            parts = [source.read(each) for each in images]
            local = parts[0] if len(parts) == 1 else torch.cat(parts)
            if grad and place in streamer.graded:
                local = leaves[place] = local.detach().requires_grad_()
            if any(place[0] in call.node.writes for call in one.calls):
                local = local.clone()
            layout = self._layout(place)
            folds = streamer.needs.graph.values[place].folds
            values[place] = local if layout is None else ShardedTensor(local, layout, "", folds)
        for call in one.calls:
            if call.random:
                streamer.before_random(call.node.id)
            node = call.node
            given = [values[p] if p in values else streamer.held[str(p[0])] for p in node.reads]
            with as_in_model(node, streamer.device):
                result = call.form.call(given, streamer.device)
            for _ in range(node.repeated):  # a norm in a checkpoint of the model learns again
                with torch.no_grad():
                    call.form.call(given, streamer.device)
            values |= made_by(node, result, given)
            if node.id in one.written:
                kept |= {p: values[p].clone() for p in node.makes if p in one.keeps}
        return values | kept, leaves

    def _differentiate(
        self, one: StreamPass, roots: list[tuple[Tensor, Tensor]], leaves: Mapping[Place, Tensor]
    ) -> None:
        streamer = self.streamer
        of_values, of_held = gradients_of(roots, leaves, streamer.parameters_of(one))
        for place, grad in of_values.items():
            layout = self._layout(place)
            true = grad if layout is None else true_gradient(grad, layout)
            copies = prod(streamer.mesh.size(a) for a in ("data", *SPATIAL) if a not in self._axes(place))
            streamer.source(place).add_gradient(self._own(place), true / copies)
        for name, grad in of_held.items():
            streamer.add_shared(name, grad)

    def _axes(self, place: Place) -> Axes:
        return self.streamer.needs.graph.values[place].axes

    # -- places --------------------------------------------------------------------------------------------------------

    def _layout(self, place: Place) -> Layout | None:
        """The layout of a value on the run's mesh; None for a plain one."""
        value = self.streamer.needs.graph.values[place]
        if not value.axes:
            return None
        cuts = tuple(
            None if a is None else self.cuts[a].scaled(n) for a, n in zip(value.axes, value.shape, strict=True)
        )
        return Layout(self.streamer.mesh, value.shape, value.axes, cuts, self.images)

    def _own(self, place: Place) -> Box:
        value = self.streamer.needs.graph.values[place]
        grid = self.streamer.needs.grid
        return value.box({a: grid.here(a, n) for a, n in value.extents.items()})

    def _region(self, place: Place, made: Tensor) -> Tensor:
        """What this rank keeps of a result, from all ranks."""
        value = self.streamer.needs.graph.values[place]
        if not isinstance(made, ShardedTensor):
            return made
        if not any(value.axes):
            return made.full()
        return pull(made, self.streamer.needs.wants(place), "a margin of tiles")


def one_by_one(box: Box) -> list[Box]:
    """The parts of a box for each image; at least one part."""
    images = [Interval(i, i + 1) for i in range(*box[0])] or [box[0]]
    return [(image, *box[1:]) for image in images]
