"""`parallelize` applies a plan to a model, in one fixed order: mesh, memory, equal weights, gradient exchange."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from mural.comm import Mesh, init
from mural.engine import Loss, Parallel, materialize, share_from_first
from mural.errors import PlanError
from mural.plan import Plan


def parallelize(
    model: nn.Module,
    plan: Plan | None = None,
    loss: Loss = F.cross_entropy,
    *,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Parallel:
    """The model under a plan; it is taken over, not copied. Collective.

    The weights become those of rank 0. A model on the meta device is given memory and its initial values here.
    `seed` is that of dropout and its like: they draw the same numbers under every plan. `mesh` is the run's where
    `mural.init` was called before; its grid has to be the plan's.

    >>> pm = parallelize(nn.Conv2d(3, 2, 3, padding=1), Plan())
    >>> pm.step(torch.zeros(1, 3, 8, 8), torch.zeros(1, 8, 8).long()).shape
    torch.Size([])
    """
    plan = Plan() if plan is None else plan
    plan.check_runnable()
    mesh = init(spatial=plan.spatial or None, data=plan.data) if mesh is None else mesh
    if mesh.size("data") != plan.data or mesh.spatial != plan.spatial:
        raise PlanError(f"the plan wants data = {plan.data}, spatial = {plan.spatial}, but the mesh is {mesh}")
    materialize(model, device)
    share_from_first(model, mesh)
    return Parallel(model, plan, mesh, loss, seed)
