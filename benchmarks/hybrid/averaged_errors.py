"""Why reducing errors is not gradient descent: the gradient from a mean of errors beside that of the batch.

Document `004` lets every node run forward, reduces «all the errors to one common average error», and back-propagates on
one node. But a layer's gradient is the product of errors with the activations of the same images:

    the batch         1/N Σ aₙᵀ δₙ
    the document      a₀ᵀ (1/N Σ δₙ)          equal only if all nodes have the same activations
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from crops import Crops, cut
from problems import QuickNet, seeded
from torch import Tensor, nn


@dataclass(frozen=True)
class Errors:
    """Nodes in one process, with that many images each."""

    nodes: int
    images: int
    iterations: int
    width: int = 8
    ranks: int = 1

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"averaged errors, {self.nodes} nodes, {self.images} images each, {self.iterations} iterations"

    def measure(self) -> dict[str, Any]:
        """How far the two gradients are apart at the start, and accuracies after training with either."""
        train, test = cut(200, test=False, seed=0), cut(40, test=True, seed=0)
        model = seeded(lambda: QuickNet(self.width)).double()
        images, labels = train.batch(torch.randperm(len(train.labels))[: self.nodes * self.images])
        true = gradient(model, of_batch(model, images.double(), labels))
        theirs = gradient(model, of_errors(model, images.double(), labels, self.nodes))
        return {
            "relative": float((theirs - true).norm() / true.norm()),
            "cosine": float(F.cosine_similarity(theirs, true, dim=0)),
            "same_images": self.with_the_same_images(model, images.double(), labels),
            "accuracy": {"batch": self.trained(train, test, None), "errors": self.trained(train, test, self.nodes)},
        }

    def with_the_same_images(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        """The relative difference if all nodes had the same images, where the two must agree."""
        images = images[: self.images].repeat(self.nodes, 1, 1, 1)
        labels = labels[: self.images].repeat(self.nodes)
        true = gradient(model, of_batch(model, images, labels))
        theirs = gradient(model, of_errors(model, images, labels, self.nodes))
        return float((theirs - true).norm() / true.norm())

    def trained(self, train: Crops, test: Crops, nodes: int | None) -> float:
        """The accuracy after training with the gradient of the batch (None), or from a mean of errors."""
        model = seeded(lambda: QuickNet(self.width))
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        draw = torch.Generator().manual_seed(1)
        for _ in range(self.iterations):
            chosen = torch.randint(len(train.labels), (self.nodes * self.images,), generator=draw)
            images, labels = train.batch(chosen)
            optimizer.zero_grad()
            loss = of_batch(model, images, labels) if nodes is None else of_errors(model, images, labels, nodes)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            scores = model(test.images())
        return float((scores.argmax(1) == test.labels).double().mean())


def of_batch(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of the whole batch."""
    return F.cross_entropy(model(images), labels)


def of_errors(model: nn.Module, images: Tensor, labels: Tensor, nodes: int) -> Tensor:
    """A number whose gradient is that of the document: the nodes' mean error, sent back through the first node.

    The i-th image of every node contributes to one error; the first node's activations are of its own images.
    """
    parts = list(zip(images.chunk(nodes), labels.chunk(nodes), strict=True))
    with torch.no_grad():
        errors = [model(x).softmax(1) - F.one_hot(y, model(x).shape[1]) for x, y in parts]
    mean = torch.stack(errors).mean(0)
    return (model(parts[0][0]) * mean).sum() / len(mean)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """The gradient of a loss as one vector."""
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


def jobs(*, quick: bool) -> list[Errors]:
    """Two and four nodes, few images each or many."""
    if quick:
        return [Errors(2, 4, 3)]
    return [Errors(nodes, images, 400) for nodes in (2, 4) for images in (5, 25)]
