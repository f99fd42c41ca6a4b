"""`check` runs a plan and plain autograd side by side, and says whether rounding explains how far apart they are."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from mural.check.alone import device_of, quiet, trial
from mural.check.case import Case
from mural.check.comparison import Comparison
from mural.comm import Mesh
from mural.comm.agree import gather, together
from mural.engine import Loss, materialize, share_from_first
from mural.errors import PlanError
from mural.parallelize import mesh_of
from mural.plan import Plan
from mural.shard import ShardedTensor

WITHOUT = "(without random layers)"
BOTH = "with them, the plan was compared with a mesh of one rank; without them, with plain autograd"
ONLY = "the plan was compared with a mesh of one rank, whose rules are the same"


def check(
    model: nn.Module,
    plan: Plan,
    image: Any,
    target: Any,
    loss: Loss = F.cross_entropy,
    *,
    mesh: Mesh | None = None,
    steps: int = 3,
) -> Comparison:
    """The largest relative differences of "output", "loss", "gradients" and "buffers" between the plan and one device.

    `print` it for a verdict; `.exact` says whether rounding explains all of it. Both take a few `steps` with updates in
    between, from the same weights, and so does one device with its input and parameters moved by an ulp: how far that
    gets is what rounding explains ([decision 0022](docs/decisions/0022-what-check-compares.md)). Every rank runs the
    whole model on the whole image, so it has to fit; the model stays as it is.

    A model that draws random numbers is compared twice: without them, and with those of a mesh of one rank. Collective.

    >>> found = check(nn.Conv2d(3, 2, 3), Plan(), torch.zeros(1, 3, 8, 8), torch.zeros(1, 6, 6).long())
    >>> max(found.values()) == 0.0, found.exact
    (True, True)
    """
    plan.check_runnable()
    if steps < 1:
        raise PlanError(f"steps = {steps}: a check takes at least one")
    mesh = mesh_of(plan) if mesh is None else mesh
    model = deepcopy(model)
    materialize(model, None)
    model.zero_grad()
    share_from_first(model, mesh)
    device = device_of(model)
    image, target = (pytree.tree_map_only(Tensor, lambda x: whole_on(x, device), given) for given in (image, target))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), full_float32(device):
        return compared(Case(model, plan, image, target, loss, mesh, steps))


def compared(case: Case) -> Comparison:
    """What came out of a case: a model that draws random numbers is compared without them, too. Collective."""
    with together(case.mesh, "the run on one device"):
        first = trial(case.model, case.plan, case.loss, case.image, case.target)
    first = gather(case.mesh, first, "the run on one device")[0]
    case = replace(case, rate=first.rate, eps=first.eps, steps=case.steps if first.rate else 1)
    if not first.drawing:
        return Comparison(case.rows(), case.steps)
    silent = replace(case, model=quiet(case.model, first.drawing))
    with together(case.mesh, "the run on one device"):
        still = trial(silent.model, case.plan, case.loss, case.image, case.target).drawing
    drawing = ", ".join(dict.fromkeys(name or "the model" for name in first.drawing))
    rows = replace(case, random=True).rows()
    if any(gather(case.mesh, bool(still), "random layers").values()):
        return Comparison(rows, case.steps, [f"{drawing} drew random numbers in evaluation mode too: {ONLY}"])
    named = [replace(row, name=f"{row.name} {WITHOUT}") for row in silent.rows()]
    return Comparison([*rows, *named], case.steps, [f"{drawing} drew random numbers: {BOTH}"])


def whole_on(x: Tensor, device: torch.device) -> Tensor:
    """A whole tensor on a device."""
    return (x.full() if isinstance(x, ShardedTensor) else x).detach().to(device)


@contextmanager
def full_float32(device: torch.device) -> Generator[None]:
    """In this block products of float32 numbers on a GPU are rounded to float32, not to TF32."""
    if device.type != "cuda":
        yield
        return
    backends: Any = torch.backends  # its types leave some of them out
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
