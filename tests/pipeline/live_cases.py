"""The law of live models: under a plan, a model trains as plain autograd does, or the plan is refused by a named error.

`outcome(case)` is "exact", "refused: …" or "wrong: …": four steps of SGD with momentum are compared loss by loss and
gradient by gradient, then all weights, buffers and watched attributes. A refusal counts where every rank raises, in the
same step, one of them with the reason, and no weight has moved in that step.
"""

from __future__ import annotations

import functools
import math
import random
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from live_blocks import RANDOM
from live_losses import Loss, loss_of
from live_models import CLASSES, OUTPUTS, Live, made
from torch import Tensor, nn

import mural
from law import difference
from mural.errors import LayoutError, PeerError, PlanError, UnsupportedOp
from ranks import DEVICE, RankError, restart, run_on

STEPS = 4
TOLERANCE = 1e-10
EXTENTS = (16, 12)
REASONS = (PlanError, UnsupportedOp, LayoutError)
State = dict[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    """A model by the names of its parts, and the fields of a plan."""

    blocks: str
    plan: tuple[tuple[str, Any], ...]
    output: str = "tensor"
    loss: str = "ce"
    images: int = 4
    seed: int = 0

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.plan) or "one rank"
        return f"{self.blocks}, {self.output}, {self.loss}, {self.images} images, {options}"


@dataclass
class Expected:
    """What plain autograd gives: a loss and gradients for each step, and at the end the state and the attributes."""

    losses: list[float] = field(default_factory=list)
    gradients: list[State] = field(default_factory=list)
    state: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    watched: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What came of a case on one rank; `step` is where it ended, -1 being `parallelize`."""

    kind: Literal["exact", "refused", "peer", "wrong"]
    step: int
    text: str = ""


# ----------------------------------------------------------------------------------------------------- the reference


def parts_of(case: Case) -> tuple[Live, Loss]:
    """The model and the loss of a case, anew, and all random numbers at their beginning."""
    model = made(case.blocks, case.output, case.seed).to(DEVICE)
    loss = loss_of(case.loss, model, case.seed)
    if isinstance(loss, nn.Module):
        loss.to(DEVICE)
    random.seed(case.seed)
    np.random.seed(case.seed)
    torch.manual_seed(case.seed)
    return model, loss


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Images and targets of a step."""
    generator = torch.Generator().manual_seed(100 * case.seed + step)
    image = torch.randn(case.images, 3, *EXTENTS, dtype=torch.float64, generator=generator)
    labels = OUTPUTS[case.output].labels
    shape = (case.images,) if labels == "class" else (case.images, *EXTENTS)
    target = torch.randint(0, CLASSES, shape, generator=generator)
    if case.loss == "mse":
        shape = (shape[0], CLASSES, *shape[1:])
        target = torch.randn(shape, dtype=torch.float64, generator=generator)
    return image.to(DEVICE), target.to(DEVICE)


def named(model: nn.Module, loss: Loss, kind: str) -> dict[str, Tensor]:
    """The parameters, buffers or state of a model, and those of its loss under `loss.`."""
    calls = {"parameters": "named_parameters", "buffers": "named_buffers", "state": "state_dict"}
    found: dict[str, Tensor] = dict(as_pairs(getattr(model, calls[kind])()))
    if isinstance(loss, nn.Module):
        found |= {f"loss.{name}": value for name, value in as_pairs(getattr(loss, calls[kind])())}
    return found


def as_pairs(found: Any) -> Iterable[tuple[str, Tensor]]:
    return found.items() if isinstance(found, Mapping) else found


def copies(tensors: Mapping[str, Tensor | None]) -> State:
    return {name: None if value is None else value.detach().cpu().clone() for name, value in tensors.items()}


def optimizer_of(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters) or [torch.zeros(1)], lr=0.05, momentum=0.9)


@functools.lru_cache(maxsize=2)  # tensors that were sent to ranks hold files open
def reference(case: Case) -> Expected:
    """Four steps on one device: of the model itself, or of one rank and one micro-batch where it draws numbers."""
    model, loss = parts_of(case)
    drawn = set(case.blocks.split("+")) & set(RANDOM)
    pm = mural.parallelize(model, mural.Plan(), loss) if drawn else None
    parameters, found = named(model, loss, "parameters"), Expected()
    optimizer = optimizer_of(parameters.values())
    for step in range(STEPS):
        image, target = batch(case, step)
        optimizer.zero_grad()
        if pm is None:
            value = loss(model(image), target)
            value.backward()
        else:
            value = pm.step(image, target)
        found.losses.append(float(value.detach()))
        found.gradients.append(copies({name: p.grad for name, p in parameters.items()}))
        optimizer.step()
    found.state, found.buffers = copies(named(model, loss, "state")), copies(named(model, loss, "buffers"))
    found.watched = {path: attribute(model, path) for path in model.watched}
    return found


def attribute(model: nn.Module, path: str) -> Any:
    """What an attribute is, whole and on the CPU."""
    value = functools.reduce(getattr, path.split("."), model)
    if isinstance(value, Tensor):
        value = value.full() if isinstance(value, mural.ShardedTensor) else value
        return value.detach().cpu().clone()
    return value


# ------------------------------------------------------------------------------------------------------- on the ranks


def trained(case: Case, expected: Expected) -> Report:
    """What comes of a case on this rank. It goes on after a difference: other ranks wait for its messages."""
    model, loss = parts_of(case)
    step, pm, before, wrong = -1, None, State(), list[str]()
    try:
        pm = mural.parallelize(model, mural.Plan(**dict(case.plan)), loss=loss, **image_of(case))
        optimizer = optimizer_of(pm.parameters())
        for step in range(STEPS):
            before = copies(dict(pm.named_parameters()))
            pm.zero_grad()
            value = float(pm.step(*batch(case, step)))
            wrong += differing(step, value, dict(pm.named_parameters()), expected)
            optimizer.step()
        step = STEPS
        wrong += differing_state(pm, model, expected)
    except (*REASONS, PeerError) as error:
        wrong += moved(before, pm)
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        kind = "peer" if isinstance(error, PeerError) else "refused"
        return Report("wrong", step, f"{'; '.join(wrong[:3])}, then {words}") if wrong else Report(kind, step, words)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Report("wrong", step, f"{text} ({at.filename.split('/')[-1]}:{at.lineno})")
    return Report("wrong", step, "; ".join(wrong[:3])) if wrong else Report("exact", step)


def image_of(case: Case) -> dict[str, Any]:
    """The extents that stages are balanced for, where the model takes no others."""
    return {"image": (3, *EXTENTS)} if "position" in case.blocks.split("+") else {}


def differing(step: int, loss: float, parameters: Mapping[str, Tensor], expected: Expected) -> list[str]:
    """What differs in one step, in words."""
    wanted, gradients = expected.losses[step], expected.gradients[step]
    found: list[str] = []
    if not math.isfinite(loss) or abs(loss - wanted) > TOLERANCE * max(abs(wanted), 1e-3):
        found.append(f"step {step}: loss {loss:.12g} where {wanted:.12g} is right")
    for name, p in parameters.items():
        right = gradients.get(name)
        if name not in gradients:
            found.append(f"step {step}: a parameter {name} that the model does not have")
        elif p.grad is None or right is None:
            if p.grad is not right:
                kinds = tuple("None" if grad is None else "a tensor" for grad in (p.grad, right))
                found.append(f"step {step}: gradient of {name} is {kinds[0]} where {kinds[1]} is right")
        elif (gap := difference(p.grad, right)) > TOLERANCE:
            found.append(f"step {step}: gradient of {name} off by {gap:.1e}")
    return found


def differing_state(pm: mural.Parallel, model: Live, expected: Expected) -> list[str]:
    """What differs after all steps, in words: names, the whole state, this rank's part of it, watched attributes."""
    state = pm.state_dict()
    found = [f"state_dict has no {name}" for name in expected.state if name not in state]
    found += [f"state_dict has {name}, which the model has not" for name in state if name not in expected.state]
    own = dict(pm.named_parameters())
    held = {f"held buffer {name}": (value, expected.buffers.get(name)) for name, value in pm.named_buffers()}
    held |= {f"held weight {name}": (value, expected.state.get(name)) for name, value in own.items()}
    held |= {name: (state[name], value) for name, value in expected.state.items() if name in state}
    gaps = {name: difference(ours, right) for name, (ours, right) in held.items()}
    found += [f"{name} off by {gap:.1e} at the end" for name, gap in gaps.items() if not gap <= TOLERANCE]
    for path, right in expected.watched.items():
        if any(name.startswith(path.rpartition(".")[0] + ".") for name in own) and not alike(
            ours := attribute(model, path), right
        ):
            found.append(f"{path} is {short(ours)} where {short(right)} is right")
    return found


def short(value: Any) -> str:
    return str(value).replace("\n", " ")[:60]


def alike(ours: Any, right: Any) -> bool:
    """Whether two attributes are the same, numbers up to rounding."""
    if isinstance(right, Tensor) or isinstance(ours, Tensor):
        return isinstance(ours, Tensor) and isinstance(right, Tensor) and difference(ours, right) <= TOLERANCE
    if isinstance(right, float):
        return isinstance(ours, float) and abs(ours - right) <= TOLERANCE * max(abs(right), 1e-3)
    return ours == right


def moved(before: State, pm: mural.Parallel | None) -> list[str]:
    """The weights that are no longer what they were before a step that raised."""
    now = {} if pm is None else copies(OrderedDict(pm.named_parameters()))
    return [f"{name} moved in the step that raised" for name, p in now.items() if not same_bits(p, before.get(name))]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


# --------------------------------------------------------------------------------------------------------- the verdict


def outcome(case: Case) -> str:
    """What comes of a case: "exact", "refused: …" with the error, or "wrong: …" with what was found."""
    world = mural.Plan(**dict(case.plan)).devices
    found = tried(world, case)
    if found.startswith("wrong") and world in REFUSED:
        restart(world)  # a case is judged by itself, not by what the ranks of a refused one still owed each other
        found = tried(world, case)
    (REFUSED.add if found.startswith("refused") else REFUSED.discard)(world)
    if found.startswith("wrong") and world > 1:
        restart(world)
    return found


REFUSED = set[int]()
"""The worlds whose last case was refused; their ranks go on, since starting others takes seconds."""


def tried(world: int, case: Case) -> str:
    """What comes of one try."""
    try:
        expected = reference(case)
    except REASONS as error:
        return f"refused: by one rank too: {error}"
    try:
        return judged(run_on(world, trained, case, expected))
    except RankError as error:
        return f"wrong: {str(error)[-300:]}"


def judged(reports: list[Report]) -> str:
    """One verdict of those of all ranks."""
    kinds = {report.kind for report in reports}
    if kinds == {"exact"}:
        return "exact"
    if "wrong" in kinds:
        return "wrong: " + " | ".join(f"rank {i}: {r.text}" for i, r in enumerate(reports) if r.kind == "wrong")
    if "exact" in kinds or "refused" not in kinds or len({report.step for report in reports}) > 1:
        texts = [f"rank {i} step {r.step}: {r.kind} {r.text}" for i, r in enumerate(reports)]
        return f"wrong: not refused by every rank alike: {' | '.join(texts)}"
    first = next(report for report in reports if report.kind == "refused")
    return f"refused: {'parallelize' if first.step < 0 else f'step {first.step}'}: {first.text}"
