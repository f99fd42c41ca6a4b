"""A plan applied to a model, in one order: mesh, memory, equal weights, channels, recompute, stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import nn

from mural.channel.split import split_channels
from mural.comm.failure.connections import roll_call
from mural.comm.failure.shared_fate import ANEW, given_up
from mural.engine.alignment import graph_for, likely_graph
from mural.engine.division import Division
from mural.engine.domain_stages import images_of, staged_by_domain
from mural.engine.extra_state import share_from_first
from mural.engine.held_model import Loss
from mural.engine.materialize import materialize, unwrapped
from mural.engine.parallel import Parallel
from mural.engine.proof import Prover
from mural.engine.recompute import recompute
from mural.engine.stage_ranks import StageRanks, check_mesh
from mural.engine.stage_starts import stage_starts
from mural.errors import PeerError
from mural.pipeline.route import Route
from mural.plans import Plan
from mural.ranks import Mesh, init


def apply_plan(
    model: nn.Module,
    plan: Plan,
    loss: Loss,
    *,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    image: Sequence[int] | Sequence[Sequence[int]] | None = None,
    prover: Prover | None = None,
) -> Parallel:
    """The model under a plan; it is taken over, not copied. Collective.

    `prover` sees the model while it is still whole, and the first batch before its step.
    """
    plan.check_runnable()
    mesh = mesh_of(plan) if mesh is None else mesh
    check_mesh(plan, mesh)
    lost = given_up(mesh.transport)
    if roll_call(mesh.transport.group, "mural.parallelize", lost) or lost:
        raise PeerError(f"parallelize got a mesh whose ranks no longer agree, since a step failed: {ANEW}")
    materialize(model, device)
    share_from_first(model, mesh)
    if prover is not None:
        prover.look(unwrapped(model), mesh)
    if plan.channel > 1:
        split_channels(unwrapped(model), mesh, plan.channel_layers, plan.channel_exchange)
    recompute(model, plan.recompute, leaving="activations" in plan.offload)
    world, plain = mesh.folded, unwrapped(model)
    kind = next((p.device.type for p in model.parameters()), "cpu")
    # For cuts by time, calls compare with each other as they do on the hardware that was measured for the package.
    hardware = "h200" if kind == "cuda" else "cpu"
    plan = staged_by_domain(plain, plan, image, hardware)
    stage_ranks = StageRanks.of(plan, world)
    if plan.stages == 1:
        return Parallel(model, plan, world, loss, seed, Division.whole(plain, stage_ranks), prover)
    shapes = images_of(plain, image)
    graph = likely_graph(plain) if shapes is None else graph_for(plain, shapes)
    route = Route.of(graph, stage_starts(graph, plan, hardware))
    return Parallel(model, plan, world, loss, seed, Division.of(plain, route, stage_ranks), prover)


def mesh_of(plan: Plan, backend: str | None = None) -> Mesh:
    """The mesh that a plan asks for, over the ranks that run."""
    if plan.grids:
        return init(data=plan.data, stage=sum(map(prod, plan.grids)), backend=backend)
    return init(plan.spatial or None, plan.data, plan.stage, plan.channel, plan.domain, backend=backend)
