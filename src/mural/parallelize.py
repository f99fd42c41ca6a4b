"""`parallelize`: a model under a plan, which it proves on a small case before the first step if asked to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from mural.check.prover import StepProver
from mural.engine import Loss, Parallel
from mural.engine.applied_plan import apply_plan
from mural.plans import Plan
from mural.ranks import Mesh


def parallelize(
    model: nn.Module,
    plan: Plan | None = None,
    loss: Loss = F.cross_entropy,
    *,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    image: Sequence[int] | Sequence[Sequence[int]] | None = None,
    prove: bool | Path = False,
) -> Parallel:
    """The model under a plan; it is taken over, not copied. Collective.

    The weights become those of rank 0. A model on the meta device is given memory and its initial values here.
    `seed` is that of dropout and its like: they draw the same numbers under every plan. `mesh` is the run's where
    `mural.init` was called before; its grid has to be the plan's. Stages are balanced for an `image` (C, H, W), or
    a shape for each of several inputs; without one, for a likely one.

    With `prove`, the first step is preceded by `mural.check` on a small case of it, and raises `ProofError` where the
    plan differs from one device; `pm.proof` is what was proved. It is remembered in the user's cache folder, or in the
    folder that `prove` names.

    >>> pm = parallelize(nn.Conv2d(3, 2, 3, padding=1), Plan())
    >>> pm.step(torch.zeros(1, 3, 8, 8), torch.zeros(1, 8, 8).long()).shape
    torch.Size([])
    """
    plan = Plan() if plan is None else plan
    prover = StepProver(plan, loss, prove) if prove else None
    return apply_plan(model, plan, loss, mesh=mesh, device=device, seed=seed, image=image, prover=prover)
