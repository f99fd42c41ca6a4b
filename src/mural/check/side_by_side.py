"""`check` runs a plan and plain autograd side by side, and says whether rounding explains how far apart they are."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from mural.check.compared_case import Case
from mural.check.comparison import Comparison
from mural.check.copies import copied
from mural.check.plain_run import PlainModel, device_of, quiet, trial
from mural.comm.failure.agree import gather, together
from mural.engine import Loss, materialize, share_from_first
from mural.engine.applied_plan import mesh_of
from mural.engine.loss_terms import LossTerms
from mural.engine.materialize import unwrapped
from mural.errors import PlanError
from mural.plans import Plan
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.shard.generators import generators_kept


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

    A model that draws random numbers is compared with a mesh of one rank, and without its random layers with plain
    autograd; a plan of less precision also in the model's own. Collective.

    >>> found = check(nn.Conv2d(3, 2, 3), Plan(), torch.zeros(1, 3, 8, 8), torch.zeros(1, 6, 6).long())
    >>> max(found.values()) == 0.0, found.exact
    (True, True)
    """
    plan.check_runnable()
    if steps < 1:
        raise PlanError(f"steps = {steps}: a check takes at least one")
    mesh = mesh_of(plan) if mesh is None else mesh
    model, loss = copied(model, loss)
    materialize(model, None)
    share_from_first(model, mesh)
    device = device_of(model)
    LossTerms.of(loss, unwrapped(model)).settle(device, mesh)
    PlainModel(model, plan, loss).zero_grad()
    image, target = (pytree.tree_map_only(Tensor, lambda x: whole_on(x, device), given) for given in (image, target))
    with generators_kept(device), full_float32(device):
        return compared(Case(model, plan, image, target, loss, mesh, steps))


def compared(case: Case) -> Comparison:
    """What came out of a case, with a strict second look at a model that draws or at a plan of less precision.

    What draws is compared with a mesh of one rank, whose rules are the plan's, and 16 bits explain large differences.
    So there the model is compared without its random layers and in its own types, too. Collective.
    """
    case, drawing = tried(case)
    rows = replace(case, random=bool(drawing)).rows()
    own = replace(case.plan, precision="float32")
    if not drawing and own == case.plan:
        return Comparison(rows, case.steps)
    model, loss = quiet(case.model, case.loss, drawing)
    strict, still = tried(replace(case, model=model, loss=loss, plan=own))
    notes = [f"{', '.join(drawing)} drew random numbers: those of a mesh of one rank on one device"] if drawing else []
    if still and own == case.plan:
        return Comparison(rows, case.steps, [*notes, f"{', '.join(still)} did so in evaluation mode, too"])
    ways = {"without random layers": drawing and not still, "without autocast": own != case.plan}
    how = " and ".join(words for words, holds in ways.items() if holds)
    more = [replace(row, how=f" ({how})") for row in replace(strict, random=bool(still)).rows()]
    return Comparison([*rows, *more], case.steps, [*notes, f"compared {how}, too"])


def tried(case: Case) -> tuple[Case, tuple[str, ...]]:
    """The case with what a first step showed, and who draws in it; rank 0's word holds. Collective."""
    with together(case.mesh, "the run on one device"):
        first = trial(case.model, case.plan, case.loss, case.image, case.target)
    first = gather(case.mesh, first, "the run on one device")[0]
    return replace(case, rate=first.rate, eps=first.eps, steps=case.steps if first.rate else 1), first.drawing


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
