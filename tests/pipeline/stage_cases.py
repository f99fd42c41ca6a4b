"""The law of stages: a model in stages trains as on one device, in float64 to 1e-10, on every rank.

The reference is the whole batch on one device; where batch norms look at micro-batches, a loop over them with the loss
weighted by images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from stage_models import made, several_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import mural
from law import difference, tensors_of
from mural.engine import Parallel
from ranks import BACKEND, DEVICE, run_on

TOLERANCE = 1e-10
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """A model under a plan: `sizes` are the extents of the images of each step, `model` a name or the model itself."""

    model: str | nn.Module
    plan: mural.Plan
    images: int = 4
    sizes: tuple[tuple[int, ...], ...] = ((16, 16),) * 3
    labels: str = "mask"
    """ "mask": a class for each position; "class": one for each image."""
    training: bool = True
    accumulate: int = 1
    rate: float = 0.05
    """Of the optimizer. Deep norms over few values magnify rounding step by step: changing the image by 1e-15 changes
    ResNet-50's second gradient by 2e-9 at 0.05, on one device."""

    def __str__(self) -> str:
        name = self.model if isinstance(self.model, str) else type(self.model).__name__
        return f"{name} {' '.join(str(self.plan).split())}"


def batch(case: Case, step: int) -> tuple[Any, Tensor]:
    """Images and targets of a step."""
    generator = torch.Generator().manual_seed(step)
    extents = case.sizes[step % len(case.sizes)]
    image = torch.randn(case.images, 3, *extents, dtype=torch.float64, generator=generator).to(DEVICE)
    shape = (case.images, *extents) if case.labels == "mask" else (case.images,)
    target = torch.randint(0, 3, shape, generator=generator).to(DEVICE)
    if case.model == "several":
        return (image, torch.randint(0, 2, (case.images, *extents), generator=generator).to(DEVICE)), target
    return image, target


def model_of(case: Case) -> nn.Module:
    """The model of a case, with the same weights on every rank."""
    model = made(case.model) if isinstance(case.model, str) else case.model
    return model.train(case.training).to(DEVICE)


def loss_for(case: Case) -> Loss:
    return several_loss if case.model == "several" else F.cross_entropy


def normalised(model: nn.Module) -> bool:
    """Whether batch norms look at the batch."""
    return any(isinstance(m, _BatchNorm) and m.training for m in model.modules())


def plain_step(model: nn.Module, image: Any, target: Tensor, parts: int, loss: Loss, weight: float = 1.0) -> float:
    """Forward and backward on one device, micro-batch by micro-batch where norms look at these."""
    images = image if isinstance(image, tuple) else (image,)
    total, pieces = 0.0, parts if normalised(model) else 1
    for some in zip(*(x.chunk(pieces) for x in (*images, target)), strict=True):
        value = loss(model(*some[:-1]), some[-1]) * (len(some[-1]) / len(target))
        (value * weight).backward()
        total += float(value.detach())
    return total


def parallel_of(case: Case, model: nn.Module | None = None) -> Parallel:
    """The model of a case under its plan."""
    shapes = ((3, 16, 16), (16, 16)) if case.model == "several" else None
    return mural.parallelize(model or model_of(case), case.plan, loss_for(case), image=shapes)


def law(case: Case) -> dict[str, float]:
    """The differences from one device of everything, by name, on this rank after all steps."""
    plain, pm = model_of(case), parallel_of(case)
    if not isinstance(case.model, str):
        raise TypeError("a model of its own comes by `made`")
    return compared(case, plain, pm)


def compared(case: Case, plain: nn.Module, pm: Parallel) -> dict[str, float]:
    """The same for a model and the same under the plan."""
    ours = torch.optim.SGD(list(pm.parameters()) or [torch.zeros(1)], lr=case.rate, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=case.rate, momentum=0.9)
    loss, found = loss_for(case), dict[str, float]()
    for step in range(len(case.sizes)):
        pm.zero_grad()
        theirs.zero_grad()
        for turn in range(case.accumulate):
            image, target = batch(case, step * case.accumulate + turn)
            expected = plain_step(plain, image, target, case.plan.microbatches, loss, 1 / case.accumulate)
            last = turn == case.accumulate - 1
            got = pm.step(image, target, reduce=last, weight=1 / case.accumulate)
            found[f"loss {step}.{turn}"] = gap(float(got), expected)
        gradients = dict(plain.named_parameters())
        for name, p in pm.named_parameters():
            found[f"gradient of {name} in step {step}"] = difference(p.grad, gradients[name].grad)
        ours.step()
        theirs.step()
    state, expected_state = pm.state_dict(), plain.state_dict()
    if list(state) != list(expected_state):
        found["names"] = math.inf
    for name, value in expected_state.items():
        found[name] = difference(state[name], value)
    for name, value in (*pm.named_parameters(), *pm.named_buffers()):
        found[f"own {name}"] = difference(
            value, plain.get_parameter(name) if name in gradients else plain.get_buffer(name)
        )
    return found | inferred(case, plain.eval(), pm.eval())


def random_law(case: Case) -> dict[str, float]:
    """The differences from a mesh of one rank, on which the same seed draws the same numbers."""
    loss = loss_for(case)
    pm = mural.parallelize(model_of(case), case.plan, loss, seed=5)
    alone = pm.world_mesh.alone(data_only=False)
    single = mural.parallelize(model_of(case), mural.Plan(), loss, mesh=alone, seed=5)
    rates = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (pm, single)]
    found: dict[str, float] = {}
    for step in range(len(case.sizes)):
        image, target = batch(case, step)
        pm.zero_grad()
        single.zero_grad()
        found[f"loss {step}"] = gap(float(pm.step(image, target)), float(single.step(image, target)))
        gradients = dict(single.named_parameters())
        for name, p in pm.named_parameters():
            found[f"gradient of {name} in step {step}"] = difference(p.grad, gradients[name].grad)
        for optimizer in rates:
            optimizer.step()
    state = pm.state_dict()
    return found | {name: difference(state[name], value) for name, value in single.state_dict().items()}


def inferred(case: Case, plain: nn.Module, pm: Parallel) -> dict[str, float]:
    """The differences of the results of inference."""
    image, _ = batch(case, 7)
    with torch.no_grad():
        expected = plain(*image) if isinstance(image, tuple) else plain(image)
    found: dict[str, float] = {}
    got = leaves_of(pm(image))
    for i, (ours, theirs) in enumerate(zip(got, tensors_of(expected), strict=True)):
        same = tuple(ours.shape) == tuple(theirs.shape)
        whole = ours.full() if hasattr(ours, "full") else ours
        found[f"result {i}"] = difference(whole, theirs) if same else math.inf
    return found


def leaves_of(result: Any) -> list[Any]:
    """The tensors of a result, be they here or elsewhere."""
    if isinstance(result, dict):
        return [leaf for value in result.values() for leaf in leaves_of(value)]
    if isinstance(result, (tuple, list)):
        return [leaf for value in result for leaf in leaves_of(value)]
    return [result]


def gap(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-3) if math.isfinite(a) and math.isfinite(b) else math.inf


def holds(case: Case, backend: str = BACKEND, function: Callable[[Case], dict[str, float]] = law) -> None:
    """Check a case on as many ranks as its plan has."""
    for rank, found in enumerate(run_on(case.plan.devices, function, case, backend=backend)):
        wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
        assert not wrong, f"rank {rank} of {case}: {wrong}"
        assert len(found) > 3
