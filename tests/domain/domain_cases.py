"""The law of domains: a separation network over ranks trains as in one process, in float64 to 1e-10, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import mural
from law import difference
from mural.domain import Ramp, Separation, SeparationNetwork, classification_network, segmentation_network
from mural.domain.placement import by_part
from ranks import DEVICE, run_on

TOLERANCE = 1e-10
ALONE = mural.Plan()


@dataclass(frozen=True)
class Case:
    """A network of some domains under a plan, or `by_part` with the plan's other axes."""

    plan: mural.Plan = ALONE
    domains: int = 2
    by_part: bool = False
    head: str = "class"
    similarity: Literal["adversary", "mmd"] = "adversary"
    reconstruction: Literal["mse", "scale-invariant"] = "scale-invariant"
    size: tuple[int, ...] = (8, 8)
    images: tuple[int, ...] = (2, 3)
    """Of each domain, over and over."""
    steps: int = 2
    unequal: bool = False
    """Whether the images of each further domain are larger."""

    def __str__(self) -> str:
        words = [f"{self.domains} domains", *str(self.plan).splitlines(), self.head, self.similarity]
        return ", ".join([*words, *(["by part"] if self.by_part else [])])

    def placed(self) -> mural.Plan:
        """The plan, with the placement by part if that is asked for."""
        return by_part(self.network(), self.plan) if self.by_part else self.plan

    def network(self) -> SeparationNetwork:
        """The network with the same weights on every rank."""
        torch.manual_seed(0)
        ramp = Ramp(start=0, length=4)
        asked = Separation(self.reconstruction, self.similarity, ramp=ramp)
        names = [f"d{i}" for i in range(self.domains)]
        if self.head == "class":
            made = classification_network(names, 3, (1, *self.size), code=5, width=2, separation=asked)
        else:
            made = segmentation_network(names, 3, (1, *self.size), width=2, separation=asked)
        return made.double().to(DEVICE)

    def batch(self, step: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Images of each domain and labels of the source."""
        generator = torch.Generator().manual_seed(step)
        images: list[Tensor] = []
        for domain in range(self.domains):
            extents = [n + 4 * domain * self.unequal for n in self.size]
            count = self.images[domain % len(self.images)]
            drawn = torch.randn(count, 1, *extents, dtype=torch.float64, generator=generator)
            images.append(drawn.to(DEVICE))
        shape = (self.images[0],) if self.head == "class" else (self.images[0], *self.size)
        return tuple(images), torch.randint(0, 3, shape, generator=generator).to(DEVICE)


def law(case: Case) -> dict[str, float]:
    """The differences from one process of losses, gradients, weights and predictions, on this rank."""
    plain, network = case.network(), case.network()
    shapes = [tuple(image.shape[1:]) for image in case.batch(0)[0]]
    pm = mural.parallelize(network, case.placed(), network.loss(F.cross_entropy), image=shapes)
    ours = torch.optim.SGD(pm.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    found: dict[str, float] = {}
    for step in range(case.steps):
        images, labels = case.batch(step)
        for model in (network, plain):
            model.at(step + 1)
        pm.zero_grad()
        theirs.zero_grad()
        loss = plain.loss(F.cross_entropy)(plain(*images), labels)
        loss.backward()
        found[f"loss {step}"] = difference(pm.step(images, labels), loss.detach())
        gradients = dict(plain.named_parameters())
        for name, p in pm.named_parameters():
            found[f"gradient of {name} in step {step}"] = difference(p.grad, gradients[name].grad)
        ours.step()
        theirs.step()
    state = pm.state_dict()
    found |= {name: difference(state[name], value) for name, value in plain.state_dict().items()}
    return found | evaluated(case, pm, plain)


def evaluated(case: Case, pm: Any, plain: SeparationNetwork) -> dict[str, float]:
    """The differences of the predictions for all domains."""
    pm.eval()
    plain.eval()
    images, _ = case.batch(9)
    with torch.no_grad():
        predictions, terms = plain(*images)
    ours, own_terms = pm(images)
    found = {f"prediction {i}": difference(whole(a), b) for i, (a, b) in enumerate(zip(ours, predictions, strict=True))}
    return found | {name: difference(whole(own_terms[name]), value) for name, value in terms.items()}


def whole(x: Any) -> Tensor:
    """A result on every rank."""
    return x.full() if hasattr(x, "full") else x


def holds(case: Case, function: Callable[[Case], dict[str, float]] = law) -> None:
    """Check a case on as many ranks as its plan has."""
    for rank, found in enumerate(run_on(case.placed().devices, function, case)):
        wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
        assert not wrong, f"rank {rank} of {case}: {wrong}"
        assert len(found) > 10
