"""A separation network: one labelled source domain and unlabelled targets, as one ordinary module.

    image of domain d ──┬── private[d] ──┐
                        │                ├── reconstruction ── compared with the image
                        └── shared ──┬───┘   difference of the two codes
                                     ├────── similarity of all shared codes
                                     └────── head, for the source: compared with its labels

The calls of one domain follow each other, the source's first; the head comes last. A plan that names these calls puts
them on ranks: parts that do not need each other run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.domain.domain_terms import Adversary, Difference, Discrepancy, Reconstruction, Similarity
from mural.domain.separation_config import Separation, Weights
from mural.errors import ConfigError, DataError

Result = tuple[tuple[Any, ...], dict[str, Tensor]]
"""Predictions (the source's in training, every domain's in evaluation), and the terms by name."""


class SeparationNetwork(nn.Module):
    """Private encoders by domain, an encoder that all share, a decoder and a head: any modules.

    The first domain is the source. Encoders of a domain give codes of one shape, (N, C) or maps (N, C, H, W); the
    decoder makes an image of their sum, the head a prediction of a shared code. `adversary` maps (N, C) to a score for
    each domain, where `separation` asks for one. `image` is the shape (C, H, W) for which a plan places the network if
    `parallelize` is not given one.
    """

    def __init__(
        self,
        private: Mapping[str, nn.Module],
        shared: nn.Module,
        decoder: nn.Module,
        head: nn.Module,
        adversary: nn.Module | None = None,
        separation: Separation | None = None,
        image: Sequence[int] | None = None,
    ):
        super().__init__()
        check_names(private)
        self.separation = Separation() if separation is None else separation
        self.image = None if image is None else tuple(image)
        self.private, self.shared = nn.ModuleDict(dict(private)), shared
        self.reconstruction = Reconstruction(decoder, self.separation.reconstruction)
        self.difference, self.similarity = Difference(), similarity_of(self.separation, adversary)
        self.head = head
        self.at(0)

    @property
    def domains(self) -> tuple[str, ...]:
        """The names of the domains; the first is the source."""
        return tuple(self.private)

    def at(self, step: int) -> None:
        """Let the ramp of the similarity term stand where it does in a step; call it before each, on every rank."""
        self.similarity.strength = self.separation.ramp.at(step)

    def forward(self, *images: Tensor) -> Result:
        """Predictions and terms for a batch of each domain, in the order of `domains`."""
        check_batches(images, self.domains)
        codes: list[Tensor] = []
        terms: dict[str, list[Tensor]] = {"reconstruction": [], "difference": [], "similarity": []}
        for number, (encoder, image) in enumerate(zip(self.private.values(), images, strict=True)):
            private = encoder(image)
            code = self.shared(image)
            codes.append(code)
            terms["reconstruction"].append(self.reconstruction(code, private, image))
            terms["difference"].append(self.difference(code, private))
            if not self.similarity.across:
                terms["similarity"].append(self.similarity(code, number))
            elif number:
                terms["similarity"].append(self.similarity(code, codes[0]))
        predictions = tuple(self.head(code) for code in (codes[:1] if self.training else codes))
        return predictions, {name: torch.stack(values).mean() for name, values in terms.items()}

    def loss(self, task: Callable[[Any, Any], Tensor] = F.cross_entropy) -> SeparationLoss:
        """The loss for `mural.parallelize`: the task's, of the source, and the weighted terms."""
        return SeparationLoss(self.domains, task, self.separation.weights)

    def arranged(self, images: Mapping[str, Any]) -> tuple[Any, ...]:
        """The batches of all domains by name as the inputs of a step, in order."""
        if set(images) != set(self.domains):
            missing, unknown = set(self.domains) - set(images), set(images) - set(self.domains)
            raise DataError(
                f"a step takes a batch of each of the domains {list(self.domains)}; missing: {sorted(missing)}, "
                f"unknown: {sorted(unknown)}. Where a domain has fewer images, begin it anew"
            )
        return tuple(images[name] for name in self.domains)

    def predictor(self) -> Predictor:
        """What remains for use: the shared encoder and the head, with the same weights, for images of any domain."""
        return Predictor(self.shared, self.head)


class Predictor(nn.Module):
    """The prediction for an image, whichever domain it is from."""

    def __init__(self, shared: nn.Module, head: nn.Module):
        super().__init__()
        self.shared, self.head = shared, head

    def forward(self, image: Tensor) -> Any:
        """The head's result for the shared code."""
        return self.head(self.shared(image))


@dataclass(frozen=True)
class SeparationLoss:
    """The task's loss on the source, plus the weighted terms.

    Labels are the source's, or a mapping by domain. Targets have none in training; in evaluation they may, for metrics
    alone: the loss does not look at them.
    """

    domains: tuple[str, ...]
    task: Callable[[Any, Any], Tensor]
    weights: Weights

    def __call__(self, result: Result, labels: Any) -> Tensor:
        """The loss of a batch."""
        predictions, terms = result
        total = self.task(predictions[0], self.of_source(labels, training=len(predictions) == 1))
        for name, value in terms.items():
            total = total + getattr(self.weights, name) * value
        return total

    def of_source(self, labels: Any, training: bool) -> Any:
        """The labels of the source."""
        source, *targets = self.domains
        if not isinstance(labels, Mapping):
            return labels
        if source not in labels:
            raise DataError(f"the source {source!r} has no labels, only {sorted(labels)}: the head learns from these")
        labelled = [name for name in targets if name in labels and labels[name] is not None]
        if labelled and training:
            raise DataError(
                f"{labelled} are targets and were given labels, which training does not use: leave these out, or make "
                f"the labelled domain the source; evaluation takes labels of targets, for metrics"
            )
        return labels[source]


def check_names(private: Mapping[str, nn.Module]) -> None:
    """Raise unless there are a source and a target whose names can stand in a plan."""
    if len(private) < 2:
        raise ConfigError(f"domains {list(private)}: a separation network has a source and at least one target")
    for name in private:
        if not name or set(name) & set(".@/:"):
            raise ConfigError(f"domain {name!r}: a plan uses the name; give letters, and none of . @ / :")


def check_batches(images: Sequence[Tensor], domains: Sequence[str]) -> None:
    """Raise unless each domain has images."""
    if len(images) != len(domains):
        raise DataError(
            f"{len(images)} batches for the {len(domains)} domains {list(domains)}: give the images of each, in this "
            f"order, as network(*network.arranged({{name: images}})) does"
        )
    for name, image in zip(domains, images, strict=True):
        if 0 in image.shape:
            raise DataError(
                f"domain {name!r} has a batch of shape {tuple(image.shape)}, without images: each step takes some of "
                f"every domain; begin a domain that has run out anew"
            )


def similarity_of(separation: Separation, adversary: nn.Module | None) -> Similarity:
    """The similarity term that was asked for."""
    if separation.similarity == "mmd":
        if adversary is not None:
            raise ConfigError('similarity = "mmd" has no adversary: leave it out, or set similarity = "adversary"')
        return Discrepancy()
    if adversary is None:
        raise ConfigError('similarity = "adversary" needs a classifier of domains: give adversary=…, or set "mmd"')
    return Adversary(adversary)
