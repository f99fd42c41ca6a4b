"""Weight norm against batch norm under data ranks: what each costs, in time and in messages.

Batch norm over the whole batch sends statistics between ranks, forward and backward, for every norm; document 003
names weight normalization as the way out. All variants are one model: without norms, with its convolutions' weights
normalized instead, with batch norms of each rank's own images, and with those of the whole batch. The learning rate is
0, so that no variant drifts away from numbers that a processor is fast with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from efficiency import STARTING
from harness.counting import counting, over_ranks
from problems import Problem, problem
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from turns import Job, taken
from variants import Ready, by_mural

import mural

RANKS = (1, 2, 4, 8, 16)
SECONDS = {"resnet18": 0.4, "unet": 0.5}
"""Of a step on one core, roughly."""


def without_norms(model: nn.Module) -> nn.Module:
    """The model with its batch norms taken out."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            model.set_submodule(path, nn.Identity())
    return model


def weight_normalized(model: nn.Module) -> nn.Module:
    """The model without batch norms, and with the weights of its convolutions normalized.

    >>> model = weight_normalized(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
    >>> [name for name, _ in model.named_parameters()]
    ['0.bias', '0.parametrizations.weight.original0', '0.parametrizations.weight.original1']
    """
    for layer in without_norms(model).modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            weight_norm(layer, dim=0 if isinstance(layer, nn.Conv2d) else 1)
    return model


def changed(given: Problem, how: Any) -> Problem:
    """A problem with another model."""
    return replace(given, model=lambda: how(given.model()))


VARIANTS = ("none", "weight norm", "batch norm, rank", "batch norm, whole batch")


def variants(given: Problem, mesh: mural.Mesh) -> dict[str, Ready]:
    """The model with each norm."""
    models = [changed(given, without_norms), changed(given, weight_normalized), given, given]
    scopes = ("rank", "rank", "rank", "global")
    found = zip(VARIANTS, models, scopes, strict=True)
    return {name: by_mural(model, mesh, "cpu", scope=scope, rate=0.0) for name, model, scope in found}


@dataclass(frozen=True)
class Norms(Job):
    """Steps of a model on some ranks, with each norm in turn."""

    part, kind = "norms", "norms"

    def measure(self) -> dict[str, Any]:
        """Seconds of each variant's steps, and how often a rank exchanges something in one. Collective."""
        ready = variants(problem(self.model, self.quick), mural.init(data=self.ranks))
        seconds = taken({name: way.step for name, way in ready.items()}, self.rounds)
        exchanges: dict[str, int] = {}
        for name, way in ready.items():
            with counting() as sent:
                way.step()
            exchanges[name] = max(over_ranks(sent.messages + len(sent.added)))
        norms = sum(isinstance(layer, nn.BatchNorm2d) for layer in ready[VARIANTS[-1]].model.modules())
        return {"seconds": seconds, "exchanges": exchanges, "norms": norms}

    @property
    def expected(self) -> float:
        """Seconds that it takes, roughly."""
        each = SECONDS[self.model] * (1.8 if self.ranks > 4 else 1.2)
        return STARTING + (self.rounds + 3) * len(VARIANTS) * each


def jobs(rounds: int, quick: bool) -> list[Norms]:
    """Every model on every number of ranks, few first."""
    models, ranks = (("unet",), (1, 2)) if quick else (("resnet18", "unet"), RANKS)
    return [Norms(model, n, rounds, quick) for n in ranks for model in models]
