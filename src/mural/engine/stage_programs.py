"""Stage programs: for each shape and mode of a batch, its route through the stages and the lists that ranks run.

A model is captured for each shape of a batch, training mode and set of trained parameters, and again where its
own Python takes another path. One stage alone needs none of this: the model itself runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mural.engine.alignment import alignment, without_hooks
from mural.engine.division import Division
from mural.engine.inputs import Image, inputs_of, shape_of
from mural.errors import PlanError
from mural.graph import capture
from mural.graph.follow import Changed, Follower
from mural.graph.held_state import HeldState
from mural.graph.module_calls import paths_of
from mural.memory.offload.moments import is_gate
from mural.pipeline.checker import check
from mural.pipeline.route import Route
from mural.pipeline.runner import LearnedForms, Seats
from mural.pipeline.schedule import Schedule, forward_only, gpipe
from mural.pipeline.stage import CutPart, Stage, StagePart, WholeModel
from mural.pipeline.transfers import Edge, Program, with_messages
from mural.shard.unread import Unread

ROUTES = 16
"""How many routes through a model are kept for each kind of batch."""
Signature = tuple[Any, ...]
Number = tuple[int, int]
"""A stage of a replica on this rank: the replica and the stage."""


@dataclass(frozen=True)
class StageProgram:
    """What the runner needs for one kind of batch; `learning` is true until it has run once."""

    program: Program
    seats: Seats
    known: LearnedForms
    learning: bool


class StagePrograms:
    """The routes of one model through the stages of its division."""

    def __init__(self, model: nn.Module, division: Division):
        self.model, self.division, self.stage_ranks = model, division, division.stage_ranks
        self.routes: dict[Signature, list[Route]] = {}
        self.modules, self.paths = dict(model.named_modules()), paths_of(model)
        self.parameters = tuple(model.parameters())
        self.programs: dict[Any, Program] = {}
        self.learned: dict[Any, tuple[Seats, LearnedForms]] = {}

    def signature(self, image: Image) -> Signature:
        """What a capture depends on, besides the model's own Python."""
        modes = tuple([module.training for module in self.modules.values()])
        trained = tuple([parameter.requires_grad for parameter in self.parameters])
        return (shapes_of(image), dtypes_of(image, self.model), modes, trained, torch.is_grad_enabled())

    def route(self, image: Image, device: torch.device) -> Route | None:
        """The route of a batch, whose calls a rehearsal has just made again; None for a model in one stage.

        The model's own Python decides what it calls. Where that has changed, the model is captured again; all ranks run
        the same Python, and reach the same result.
        """
        if self.stage_ranks.plan.stages == 1:
            return None
        signature = self.signature(image)
        known = self.routes.setdefault(signature, [])
        for route in known:
            if self.rehearsed(route, device):
                known.remove(route)
                known.insert(0, route)  # the likeliest one next time
                return route
        known.insert(0, self.route_of(image))
        del known[ROUTES:]
        check_hooks(self.model, known[0].script.opened)
        self.rehearse(known[0], device)
        return known[0]

    def rehearsed(self, route: Route, device: torch.device) -> bool:
        """Whether the model makes the calls of a route, as it is now."""
        try:
            self.rehearse(route, device)
        except Changed:
            return False
        return True

    def rehearse(self, route: Route, device: torch.device) -> None:
        """Run the open modules of a route without computing anything; raises `Changed` where they make other calls."""
        held = HeldState.by({path: self.modules[path] for path in route.script.opened}, values=False)
        try:
            Follower(route.script, None, {}, device, self.paths).run(self.model)
        finally:
            held.put_back()

    def route_of(self, image: Image, count: int | None = None) -> Route:
        """The route of a batch, or of that many images of it, as the model is now."""
        shapes, total = shapes_of(image), shape_of(image)[0]
        if count is not None:
            shapes = tuple((count, *shape[1:]) if shape and shape[0] == total else shape for shape in shapes)
        with without_hooks(self.model), torch.enable_grad():
            graph = capture(self.model, shapes, dtypes_of(image, self.model))
        return self.division.route(graph)

    def stages(
        self, route: Route | None, image: Image, scope: Callable[[], Any], device: torch.device
    ) -> dict[Number, Stage]:
        """This rank's stages, by replica and stage."""
        again = self.stage_ranks.plan.recompute == "stages"
        found: dict[Number, Stage] = {}
        for replica, stage in self.stage_ranks.schedule(1).holds(self.stage_ranks.own):
            if route is None:
                part: StagePart = WholeModel(self.model, len(shapes_of(image)))
            else:
                part = CutPart(self.model, route.script, stage, self.paths)
            found[replica, stage] = Stage(part, self.stage_ranks.mesh, scope, device, again)
        return found

    def stage_program(self, route: Route | None, image: Image, microbatches: int, training: bool) -> StageProgram:
        """The lists of all seats for a batch in micro-batches, and what is known of the tensors that cross."""
        key = (self.signature(image), id(route), microbatches, training)
        if key not in self.learned:
            meshes = self.stage_ranks.meshes
            aligns = {mesh.spatial: alignment(self.model, shape_of(image), mesh.spatial) for mesh in meshes}
            seats = Seats(meshes, self.stage_ranks.own, tuple(aligns[mesh.spatial] for mesh in meshes))
            self.learned[key] = (seats, LearnedForms())
        seats, known = self.learned[key]
        learning = not known.complete
        edges = () if route is None else route.edges
        return StageProgram(self.program(edges, microbatches, training, 0 if learning else 1), seats, known, learning)

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
        plan = self.stage_ranks.plan
        if training:
            return self.stage_ranks.schedule(microbatches)
        own = plan.schedule == "interleaved" or plan.seats
        return forward_only(self.stage_ranks.schedule(microbatches) if own else gpipe(plan.stage, microbatches))


def shapes_of(image: Image) -> tuple[tuple[int, ...], ...]:
    """The shapes of a batch's inputs."""
    parts = inputs_of(image)
    return tuple(tuple(part.shape) for part in parts) if parts is image else (shape_of(image),)


def dtypes_of(image: Image, model: nn.Module) -> tuple[torch.dtype, ...]:
    """The types of the inputs: a tensor's own, else that of the model's weights."""
    weights = (p.dtype for p in model.parameters() if p.is_floating_point())
    default = next(weights, torch.get_default_dtype())
    return tuple(part.dtype if isinstance(part, (Tensor, Unread)) else default for part in inputs_of(image))


def check_hooks(model: nn.Module, opened: Container[str]) -> None:
    """Raise for a forward hook on a module that a cut goes through: it would see tensors that other stages have.

    Gates of offload need not see them: a parameter that is used without having passed one stays.
    """
    for path, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if path in opened and any(not is_gate(hook) for hook in hooks):
            raise PlanError(
                f"module {path!r} has a forward hook, but is not called as a whole: its parts are in several stages "
                f"or exchange tensors other than through it. Put the hook on a module inside a stage, or move the cut"
            )
