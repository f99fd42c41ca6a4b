"""Three ways to train for a target without labels: the source alone, a separation network, and the target's labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from digit_domains import EACH, SOURCE, Digits, Labelled
from torch import Tensor, nn
from torch.nn import functional as F

from mural.domain import Ramp, Separation, SeparationNetwork, Weights
from mural.domain.default_parts import class_head, domain_classifier

CODE, WIDTH, CLASSES, BATCH = 32, 32, 10, 64
UNLABELLED = -100
WEIGHTS = Weights(reconstruction=0.1, difference=0.05, similarity=0.3)


@dataclass(frozen=True)
class Recipe:
    """How long is trained, how fast, and what a separation network minimises."""

    steps: int = 500
    rate: float = 2e-3
    similarity: Literal["adversary", "mmd"] = "mmd"
    weights: Weights = WEIGHTS
    ramp: float = 0.0
    """The part of the steps over which the similarity term sets in."""

    @property
    def separation(self) -> Separation:
        """The losses."""
        return Separation("mse", self.similarity, self.weights, Ramp(length=int(self.ramp * self.steps)))


def encoder(width: int) -> nn.Sequential:
    """Two convolutions with norms, and a linear layer: a code for each digit."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(1, width), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(1, 2 * width), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(8 * width, CODE),
    )  # fmt: skip


def decoder() -> nn.Sequential:
    """A digit of a code."""
    return nn.Sequential(nn.ReLU(), nn.Linear(CODE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Unflatten(1, (1, 8, 8)))


def drawn(images: Tensor) -> Tensor:
    """The places of a batch."""
    return torch.randint(len(images), (BATCH,))


def supervised(data: Labelled, seed: int, recipe: Recipe) -> nn.Module:
    """The shared encoder and the head alone, trained on labelled images of one domain."""
    torch.manual_seed(seed)
    model = nn.Sequential(encoder(WIDTH), class_head(CODE, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), recipe.rate)
    images, labels = data
    for _ in range(recipe.steps):
        some = drawn(images)
        optimizer.zero_grad()
        F.cross_entropy(model(images[some]), labels[some]).backward()
        optimizer.step()
    return model


def separated(digits: Digits, targets: Sequence[str], seed: int, recipe: Recipe, labelled: float = 1.0) -> nn.Module:
    """The predictor of a separation network; a part of the source's images has labels, half of a batch at least."""
    torch.manual_seed(seed)
    names = (SOURCE, *targets)
    adversary = domain_classifier(CODE, len(names)) if recipe.similarity == "adversary" else None
    network = SeparationNetwork(
        {name: encoder(WIDTH // 4) for name in names}, encoder(WIDTH), decoder(), class_head(CODE, CLASSES), adversary,
        recipe.separation,
    )  # fmt: skip
    loss, optimizer = network.loss(), torch.optim.Adam(network.parameters(), recipe.rate)
    images, labels = digits.source[0], some_labels(digits.source[1], labelled)
    known = (labels != UNLABELLED).nonzero()[:, 0]
    for step in range(recipe.steps):
        network.at(step)
        some = torch.cat([known[torch.randint(len(known), (BATCH // 2,))], drawn(images)[: BATCH // 2]])
        batches = {name: digits.targets[name][0] for name in targets}
        batch = {name: every[drawn(every)] for name, every in batches.items()}
        optimizer.zero_grad()
        loss(network(*network.arranged({SOURCE: images[some], **batch})), labels[some]).backward()
        optimizer.step()
    return network.predictor()


def some_labels(labels: Tensor, part: float) -> Tensor:
    """The labels of the first images, and none of the others."""
    return torch.where(torch.arange(EACH) < round(part * EACH), labels, UNLABELLED)


def accuracy(model: nn.Module, test: Labelled) -> float:
    """The part of the test's images that is recognised."""
    model.eval()
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())
