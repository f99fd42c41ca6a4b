"""A short training on the batches of an image sampler, by a loop of plain torch: what trainers are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mural.data import ImageSampler
from mural.models import UNet
from mural.ranks import Mesh

IMAGES, BATCH, EPOCHS = 8, 4, 2

Trained = tuple[list[float], dict[str, Tensor]]
"""The losses of all steps, and the model's state after them."""


def made() -> tuple[nn.Module, TensorDataset]:
    """A model and images, the same in every process."""
    torch.manual_seed(0)
    images, masks = torch.rand(IMAGES, 3, 18, 13, dtype=torch.float64), torch.randint(2, (IMAGES, 18, 13))
    return UNet(width=3, depth=2).double(), TensorDataset(images, masks)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sampled(epoch: int) -> list[int]:
    """The order of an epoch by an image sampler."""
    sampler = ImageSampler(range(IMAGES), Mesh.of_one())
    sampler.set_epoch(epoch)
    return list(sampler)


def plainly_trained(order: Callable[[int], Sequence[int]] = sampled) -> Trained:
    """In one process, on whole batches in the order of each epoch."""
    model, dataset = made()
    optimizer, losses = optimizer_of(model), list[float]()
    for epoch in range(EPOCHS):
        for image, mask in DataLoader(dataset, BATCH, sampler=order(epoch)):
            loss = F.cross_entropy(model(image), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()
