"""Itineraries: for the shapes and modes that a model meets, its route through the stages and the lists that ranks run.

A model is captured once for each shape of a micro-batch, training mode and set of trained parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mural.engine.alignment import alignment, without_hooks
from mural.engine.division import Division
from mural.engine.inputs import Image, shape_of
from mural.errors import PlanError
from mural.graph import Graph, capture
from mural.graph.replay import Replay, check_hooks, check_result
from mural.pipeline.checker import check
from mural.pipeline.draws import draws_in_parts
from mural.pipeline.instance import Stage
from mural.pipeline.messages import Edge, Program, with_messages
from mural.pipeline.route import Route, draws
from mural.pipeline.runner import Known, Seats
from mural.pipeline.schedule import Schedule, forward_only, gpipe
from mural.shard.draws import Draws
from mural.shard.rows import Rows
from mural.shard.unread import Unread

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Trip:
    """What the runner needs for one kind of batch; `learning` is true until it was run once."""

    program: Program
    seats: Seats
    known: Known
    learning: bool


class Itineraries:
    """The routes of one model through the stages of its division."""

    def __init__(self, model: nn.Module, division: Division):
        self.model, self.division, self.seating = model, division, division.seating
        self.routes: dict[Signature, Route] = {}
        self.programs: dict[Any, Program] = {}
        self.stage_sets: dict[Any, dict[tuple[int, int, int], Stage]] = {}
        self.trips: dict[Any, tuple[Seats, Known]] = {}

    def signature(self, image: Image, count: int) -> Signature:
        """What a capture depends on."""
        modes = tuple(module.training for module in self.model.modules())
        trained = tuple(parameter.requires_grad for parameter in self.model.parameters())
        return (shapes_of(image, count), dtypes_of(image, self.model), modes, trained, torch.is_grad_enabled())

    def route(self, image: Image, count: int) -> Route:
        """The route of a micro-batch of that many images."""
        signature = self.signature(image, count)
        if signature not in self.routes:
            with without_hooks(self.model), torch.enable_grad():
                graph = capture(self.model, signature[0], signature[1])
            check_result(graph)
            self.routes[signature] = self.division.route(graph)
        return self.routes[signature]

    def stages(
        self, image: Image, rows: Sequence[Rows], scope: Callable[[], Any], device: torch.device
    ) -> Mapping[tuple[int, int, int], Stage]:
        """This rank's stages, by replica, stage and images in a micro-batch."""
        counts = sorted({part.count for part in rows})
        key = tuple(self.signature(image, count) for count in counts)
        if key not in self.stage_sets:
            found: dict[tuple[int, int, int], Stage] = {}
            again = self.division.seating.plan.recompute == "stages"
            for count in counts:
                route = self.route(image, count)
                for replica, stage in self.seating.schedule(1).holds(self.seating.own):
                    replay = Replay(route.graph, self.model, route.stretches[stage])
                    found[replica, stage, count] = Stage(replay, self.seating.mesh, scope, device, again)
            self.stage_sets[key] = found
        found_draws = {count: self.draws(image, count) for count in counts}
        for (_, _, count), stage in self.stage_sets[key].items():
            stage.draws = found_draws[count]
        return self.stage_sets[key]

    def draws(self, image: Image, count: int) -> Draws:
        """What micro-batches of that many images draw as plain tensors; raises where they cannot draw as the batch."""
        graph, total = self.route(image, count).graph, shape_of(image)[0]
        if count == total or not any(draws(node) for node in graph):
            return {}
        return draws_in_parts(graph, self.route(image, total).graph, count, total)

    def trip(self, image: Image, rows: Sequence[Rows], training: bool) -> Trip:
        """The lists of all seats for a batch in these micro-batches, and what is known of the tensors that cross."""
        counts = sorted({part.count for part in rows}, reverse=True)
        routes = [self.route(image, count) for count in counts]
        check_hooks(self.model, (stretch for route in routes for stretch in route.stretches))
        if training and len(rows) > 1:
            check_batchnorm(routes[0].graph, self.seating.plan.norms_apart)
        edges = common_edges(routes, counts)
        key = (tuple(self.signature(image, count) for count in counts), len(rows), training)
        if key not in self.trips:
            shape = (rows[0].total, *shape_of(image)[1:])
            meshes = self.seating.meshes
            aligns = {mesh.spatial: alignment(self.model, shape, mesh.spatial) for mesh in meshes}
            seats = Seats(meshes, self.seating.own, tuple(aligns[mesh.spatial] for mesh in meshes))
            self.trips[key] = (seats, Known())
        seats, known = self.trips[key]
        learning = not known.complete
        return Trip(self.program(edges, len(rows), training, 0 if learning else 1), seats, known, learning)

    def program(self, edges: tuple[Edge, ...], microbatches: int, training: bool, prefetch: int) -> Program:
        """The full lists, proven to run to their end."""
        key = (edges, microbatches, training, prefetch)
        if key not in self.programs:
            program = with_messages(self.schedule(microbatches, training), edges, prefetch)
            verdict = check(program)
            if not verdict.ok:
                raise PlanError(f"the plan's lists do not run to their end: {verdict}")
            self.programs[key] = program
        return self.programs[key]

    def schedule(self, microbatches: int, training: bool) -> Schedule:
        """The plan's schedule; inference takes one replica alone, in order."""
        plan = self.seating.plan
        if training:
            return self.seating.schedule(microbatches)
        own = plan.schedule == "interleaved" or plan.seats
        return forward_only(self.seating.schedule(microbatches) if own else gpipe(plan.stage, microbatches))


def shapes_of(image: Image, count: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of a micro-batch's inputs."""
    if isinstance(image, tuple) and any(isinstance(part, Tensor) for part in image):
        total = shape_of(image)[0]
        return tuple((count, *p.shape[1:]) if p.ndim and len(p) == total else tuple(p.shape) for p in image)
    return ((count, *shape_of(image)[1:]),)


def dtypes_of(image: Image, model: nn.Module) -> tuple[torch.dtype, ...]:
    """The types of the inputs: a tensor's own, else that of the model's weights."""
    parts: Sequence[Any] = image if isinstance(image, tuple) and isinstance(image[0], Tensor) else [image]
    weights = (p.dtype for p in model.parameters() if p.is_floating_point())
    default = next(weights, torch.get_default_dtype())
    return tuple(part.dtype if isinstance(part, (Tensor, Unread)) else default for part in parts)


def common_edges(routes: Sequence[Route], counts: Sequence[int]) -> tuple[Edge, ...]:
    """The edges that the micro-batches of a batch have in common: those of the first, which the others have too."""
    plain = [tuple(replace(edge, bytes=0) for edge in route.edges) for route in routes]
    for edges, count in zip(plain, counts, strict=True):
        if edges != plain[0]:
            raise PlanError(
                f"micro-batches of {counts[0]} and of {count} images take other ways through the model: choose a batch "
                f"that microbatches divides"
            )
    return routes[0].edges


def check_batchnorm(graph: Graph, apart: bool) -> None:
    """Raise where micro-batches would be normalised alone without having been asked to."""
    for node in graph:
        if node.op == "batch_norm" and not apart and in_training(node.args, dict(node.kwargs)):
            raise PlanError(
                f"{node.site} normalises in training, and micro-batches would each be normalised alone, which is "
                f'another result than that of the whole batch: set batchnorm = "micro" to have that ("micro-rank": '
                f"on each rank alone), or microbatches = 1"
            )


def in_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of batch norm takes the statistics of its input."""
    bound = inspect.signature(F.batch_norm).bind(*args, **kwargs)
    bound.apply_defaults()
    return bool(bound.arguments["training"])
