"""How a case is compared with plain autograd: each script of the hunt ends with this file's text."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import mural
from mural.channel.share import share_of
from mural.engine.microbatches import part_of, rows_of
from mural.errors import MuralError, PeerError
from mural.ranks.spawn import run_local

TOLERANCE, ULPS, FACTOR, ILL = 1e-10, 8, 512.0, 1e-6
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model with a loss under a plan, and how steps are taken."""

    model: Callable[[], nn.Module]
    loss_of: Callable[[nn.Module], Callable[[Any, Any], Tensor]]
    plan: mural.Plan
    sizes: tuple[tuple[int, ...], ...]
    images: int
    target: str = "labels"
    random: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def made(self) -> nn.Module:
        """The model in float64, every parameter moved from where it began, so that branches of zeros speak."""
        torch.manual_seed(self.seed)
        model = self.model().double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.05)
            for name, b in model.named_buffers():
                if name.endswith("running_var"):
                    b.uniform_(0.5, 2.0)
        return model

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Image and target of a step; the target's extents are those of the plain model's logits."""
        generator = torch.Generator().manual_seed(100 * self.seed + step)
        extents = self.sizes[step % len(self.sizes)]
        image = torch.randn(self.images, 3, *extents, dtype=torch.float64, generator=generator)
        with torch.no_grad(), torch.random.fork_rng():
            shape = tuple(leaves(self.made()(image.clone()))[0].shape)
        if self.target in ("real", "binary"):
            real = torch.rand(shape, dtype=torch.float64, generator=generator)
            return image, real.round() if self.target == "binary" else real
        target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
        if self.target == "ignored":
            target[torch.rand(target.shape, generator=generator) < 0.4] = 255
        return image, target

    def reference(self, mesh: Any) -> Any:
        """How the model runs on one device: plain torch, or for random layers a mesh of this rank alone."""
        model = self.made()
        if not self.random:
            return Plain(model, self)
        more = {"microbatches": self.plan.microbatches, "batchnorm": "micro"} if self.plan.norms_apart else {}
        alone = mesh.alone(data_only=False)
        return mural.parallelize(model, mural.Plan(**more), self.loss_of(model), mesh=alone, seed=self.seed)


class Plain:
    """The model on one device, with the calls of a parallel model that a case makes."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.module, self.loss = model, case.loss_of(model)
        self.parts = case.plan.microbatches if case.plan.norms_apart else 1

    def step(self, image: Tensor, target: Tensor, reduce: bool = True, weight: float = 1.0) -> Tensor:
        """The loss, after forward and backward."""
        loss = self.loss(self.result(image), target)
        (loss * weight).backward()
        return loss.detach()

    def result(self, image: Tensor) -> Any:
        """What the module gives: for each micro-batch alone where norms look at it alone, some in evaluation, too."""
        parts = rows_of(image.shape[0], self.parts)
        results = [self.module(part_of(image, rows)) for rows in parts] if len(parts) > 1 else [self.module(image)]
        return results[0] if len(results) == 1 else pytree.tree_map(lambda *each: torch.cat(each), *results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def clip_grad_norm_(self, most: float) -> Tensor:
        """The norm of all gradients."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), most)

    def __call__(self, image: Tensor) -> Any:
        with torch.no_grad():
            return self.result(image)


def leaves(result: Any) -> list[Any]:
    """All values of a result in order; what has `full` is one, here or on another rank."""
    fields = None if hasattr(result, "full") else getattr(result, "__dataclass_fields__", None)
    return pytree.tree_leaves([getattr(result, name) for name in fields] if fields else result)


def whole(value: Any) -> Tensor:
    """A value as a plain tensor."""
    value = value.full() if hasattr(value, "full") else value
    return value.detach().clone() if isinstance(value, Tensor) else torch.as_tensor(0.0 if value is None else value)


def moved(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """A tensor, every entry moved up or down by some ulps if there is a generator."""
    if generator is None:
        return x
    signs = torch.randint(2, x.shape, generator=generator).double() * 2 - 1
    return x + x * signs * (ULPS * torch.finfo(torch.float64).eps)


def optimizer_for(model: Any, case: Case) -> torch.optim.Optimizer:
    """The optimizer that the options name."""
    parameters, rate = list(model.parameters()) or [torch.zeros(1)], case.options.get("rate", 0.05)
    if case.options.get("optimizer") == "adam":
        return torch.optim.AdamW(parameters, rate, eps=0.1)
    return torch.optim.SGD(parameters, rate, 0.9)


def values(model: Any, case: Case, probe: torch.Generator | None = None) -> Values:
    """What steps and inference leave, by name. A probe moves parameters and images by some ulps."""
    found, turns = Values(), case.options.get("accumulate", 1)
    random.seed(case.seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(moved(p, probe))
    optimizer = optimizer_for(model, case)
    for step in range(case.options.get("steps", 1)):
        model.zero_grad()
        for turn in range(turns):
            image, target = case.batch(step * turns + turn)
            image = moved(image, probe).requires_grad_(case.options.get("input_gradients", False))
            loss = model.step(image, target, reduce=turn == turns - 1, weight=1 / turns)
            found[f"loss {step}.{turn}"] = whole(loss)
            if image.requires_grad:
                found[f"input gradient {step}.{turn}"] = whole(image.grad)
        found |= {f"gradient {step} of {name}": whole(p.grad) for name, p in model.named_parameters()}
        if case.options.get("clip"):
            found[f"norm {step}"] = whole(model.clip_grad_norm_(0.5))
        optimizer.step()
    found |= {f"state {name}": whole(value) for name, value in model.state_dict().items()}
    found |= {f"buffer {name}": whole(value) for name, value in model.named_buffers()}
    if case.options.get("inference", True):
        model.eval()
        found |= {f"result {i}": whole(value) for i, value in enumerate(leaves(model(case.batch(7)[0])))}
    return found


def distance(a: Tensor, b: Tensor, largest: float) -> float:
    """The difference relative to the largest entry of the value, or to a thousandth of the largest of its kind."""
    if a.is_meta:
        return float("inf")
    if a.shape != b.shape:
        nothing = not bool(a.any()) and not bool(b.any())  # no gradient, or one of zeros
        return 0.0 if nothing and 0 in (a.ndim, b.ndim) else float("inf")
    if not a.numel() or torch.equal(a, b):
        return 0.0
    gap, scale = (a.double() - b.double()).abs().max(), b.double().abs().max()
    return float(gap / max(float(scale), 1e-3 * largest, 1e-12)) if gap.isfinite() else float("inf")


def distances(found: Values, expected: Values) -> dict[str, float]:
    """The differences by name."""
    sizes: dict[str, float] = {}
    for name, value in expected.items():
        kind = name.split()[0]
        sizes[kind] = max(sizes.get(kind, 0.0), float(value.double().abs().max()) if value.numel() else 0.0)
    return {name: distance(found[name], expected[name], sizes[name.split()[0]]) for name in found if name in expected}


def unexplained(wrong: dict[str, float], expected: Values, case: Case, pm: Any) -> dict[str, float] | None:
    """Those differences that rounding does not explain: one device, moved by ulps. None: it would explain anything."""
    noise: dict[str, float] = {}
    for seed in range(3):
        probe = values(case.reference(pm.world_mesh), case, torch.Generator().manual_seed(seed))
        for name, value in distances(held(probe, pm), expected).items():
            noise[name] = max(noise.get(name, 0.0), value)
    limits = {name: FACTOR * noise.get(name, 0.0) for name in wrong}
    left = {name: value for name, value in wrong.items() if value > limits[name]}
    return None if not left and max(limits.values()) > ILL else left


def outcome(case: Case) -> tuple[str, str]:
    """A word and a detail: exact, refused, incorrect, crashed; skipped for what is no case, peer for another's error.

    Collective.
    """
    try:
        expected = values(Plain(case.made(), case), case)
    except Exception:
        return "skipped", traceback.format_exc(limit=-2)
    if not all(bool(value.double().isfinite().all()) for value in expected.values()):
        return "skipped", "numbers that are not finite"
    try:
        model = case.made()
        image = (3, *case.sizes[0]) if case.options.get("image") else None
        pm = mural.parallelize(model, case.plan, case.loss_of(model), seed=case.seed, image=image)
        if case.random:
            expected = values(case.reference(pm.world_mesh), case)
        found = values(pm, case)
    except PeerError:
        return "peer", traceback.format_exc(limit=-3)
    except MuralError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception:
        return "crashed", traceback.format_exc()
    return verdict(found, expected, case, pm)


def held(expected: Values, pm: Any) -> Values:
    """The values with gradients of split layers as this rank holds them."""
    shares = {name: share_of(p) for name, p in pm.named_parameters()}
    found = dict(expected)
    for place, value in expected.items():
        share = shares.get(place.partition(" of ")[2]) if place.startswith("gradient") else None
        if share is not None and value.ndim:
            found[place] = share.cut(value)
    return found


def verdict(found: Values, expected: Values, case: Case, pm: Any) -> tuple[str, str]:
    """Whether what a plan left is what one device leaves."""
    expected = held(expected, pm)
    whole_ones = (name for name in expected if name.startswith(("loss", "state", "result")))
    apart = distances(found, expected) | {name: float("inf") for name in whole_ones if name not in found}
    wrong: dict[str, float] | None = {name: value for name, value in apart.items() if not value <= TOLERANCE}
    if wrong and max(wrong.values()) < float("inf"):
        wrong = unexplained(wrong, expected, case, pm)
    if wrong is None:
        return "skipped", "rounding would explain any difference"
    worst = sorted(wrong.items(), key=lambda item: (not item[0].startswith("loss"), -item[1]))
    return ("incorrect", ", ".join(f"{name}: {value:.1e}" for name, value in worst[:6])) if wrong else ("exact", "")


def told(rank: int) -> None:
    """Print what `outcome` found; raise if it is neither exact nor refused."""
    torch.set_num_threads(1)
    word, detail = outcome(sys.modules[__name__].CASE)
    print(f"rank {rank}: {word} {detail}", flush=True)
    if word not in ("exact", "refused", "peer"):
        raise SystemExit(f"rank {rank}: {word}")


def main(case: Case) -> None:
    """Run the case on its ranks; the exit code is 0 if it is exact or refused by name."""
    if case.plan.devices == 1:
        told(0)
    else:
        run_local(told, case.plan.devices, timeout=120.0)
