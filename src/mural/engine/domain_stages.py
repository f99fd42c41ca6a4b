"""A plan with a domain axis as one of stages: each domain's branch of a separation network is balanced by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from mural.domain.placement import Branch, by_domain, check_statistics
from mural.domain.separation_network import SeparationNetwork
from mural.engine.alignment import graph_for
from mural.engine.stage_starts import stage_starts
from mural.errors import PlanError
from mural.plans import Plan

Shapes = Sequence[int] | Sequence[Sequence[int]]


def images_of(model: nn.Module, image: Shapes | None) -> Shapes | None:
    """The shapes that stages are chosen for; one shape stands for the images of all domains."""
    if not isinstance(model, SeparationNetwork):
        return image
    given = model.image if image is None else image
    if given is None:
        raise PlanError(
            "the stages of a separation network are chosen for images of some shape: give parallelize(…, "
            "image=(C, H, W)), or a shape for each domain"
        )
    several = [tuple(part) for part in given if isinstance(part, Sequence)]
    return several or [tuple(n for n in given if isinstance(n, int))] * len(model.domains)


def staged_by_domain(model: nn.Module, plan: Plan, image: Shapes | None, hardware: str) -> Plan:
    """The plan itself, or, where it has a domain axis, the stages and seats that this means for the model."""
    if isinstance(model, SeparationNetwork) and plan.domain * plan.stage > 1:
        check_statistics(model)
    if plan.domain == 1:
        return plan
    if not isinstance(model, SeparationNetwork):
        raise PlanError(
            f"domain = {plan.domain} divides the domains of a mural.domain.SeparationNetwork, but the model is a "
            f"{type(model).__name__}: set domain = 1, or train a SeparationNetwork"
        )
    shapes = [tuple(shape) for shape in images_of(model, image) or () if isinstance(shape, Sequence)]
    alone = replace(plan, domain=1)
    starts = [
        stage_starts(graph_for(Branch(model, number), shape), alone, hardware) for number, shape in enumerate(shapes)
    ]
    return by_domain(model, graph_for(model, shapes), plan, starts)
