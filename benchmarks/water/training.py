"""One training: on whole windows or patches of some continents, or of continents as domains.

All parts share the network, the loss and the order of lines. Only what a step is cut into differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from context.training import schedule
from torch import Tensor, nn

import mural
from mural.domain import Ramp, Separation, SeparationNetwork
from mural.domain.default_parts import domain_classifier
from mural.models import UNet
from water.cases import Part, Settings
from water.world import CLASSES, CONTINENTS, LAND, SOURCE, TARGETS, TRAINING

WEIGHT = (0.0, 1.0, 10.0)
"""Of land, ocean and lake in the loss: land is given, and lakes are a hundredth of the training boxes' water."""
CODE = 16
"""Channels of the codes of domains, and of the layer before the scores in all networks."""
POINTS = 20
"""Points of a loss curve that are kept."""


def as_input(labels: Tensor) -> Tensor:
    """What a network sees of labels (N, H, W): 1 for water and 0 for land, (N, 1, H, W)."""
    return torch.where(labels != LAND, 1.0, 0.0)[:, None]


def encoder(settings: Settings) -> UNet:
    """A U-Net with group norms: they are the same in training and in use, for one large window and for many patches."""
    return UNet(in_channels=1, classes=CODE, width=settings.width, depth=settings.depth, norm="group")


def head() -> nn.Sequential:
    """Scores of the classes."""
    return nn.Sequential(nn.ReLU(), nn.Conv2d(CODE, CLASSES, 1))


def separation_network(settings: Settings) -> SeparationNetwork:
    """The same encoder and head with small private encoders, a decoder and an adversary; losses of the library."""
    names = (SOURCE, *TARGETS)
    decoder = nn.Sequential(nn.Conv2d(CODE, CODE, 3, padding=1), nn.ReLU(), nn.Conv2d(CODE, 1, 3, padding=1))
    private = {name: UNet(in_channels=1, classes=CODE, width=4, depth=2, norm="group") for name in names}
    losses = Separation("mse", ramp=Ramp(length=settings.domain_steps))
    adversary = domain_classifier(CODE, len(names))
    return SeparationNetwork(private, encoder(settings), decoder, head(), adversary, losses)


def corners(names: Sequence[str], extent: int, width: int, shape: tuple[int, int], seed: int) -> Tensor:
    """Where the patches of each step begin on a map of that width: (*shape, 2), anywhere in these continents."""
    draw = torch.Generator().manual_seed(7919 * (seed + 1))
    boxes = torch.tensor([CONTINENTS[name].pixels(width) for name in names])
    areas = boxes[:, 2:].prod(1).double()
    which = torch.multinomial(areas, math.prod(shape), replacement=True, generator=draw).view(shape)
    first, extents = boxes[which].split(2, -1)
    room = extents - extent + 1
    return first + (torch.rand(room.shape, generator=draw, dtype=torch.float64) * room).long()


def cut(world: Tensor, corner: Tensor, extent: int) -> Tensor:
    """The patches (N, extent, extent) of a map that begin at these corners (N, 2)."""
    along = torch.arange(extent, device=world.device)
    rows, columns = corner[:, :1] + along, corner[:, 1:] + along
    return world[rows[:, :, None], columns[:, None, :]]


def turned(labels: Tensor, step: int) -> Tensor:
    """One of the eight ways to lay the patches (N, H, W) of a step: each comes in turn."""
    return torch.rot90(labels.flip(2) if step % 8 >= 4 else labels, step % 4, (1, 2))


def weighted(world: Tensor) -> nn.CrossEntropyLoss:
    """The loss of scores and labels, on the device of a map."""
    return nn.CrossEntropyLoss(torch.tensor(WEIGHT, device=world.device))


def on_windows(part: Part, settings: Settings, world: Tensor) -> tuple[nn.Module, list[float]]:
    """The network of a part and its losses, trained on patches or windows of the continents for training.

    All go through mural, here on one rank: on more, the same lines train the same network.
    """
    torch.manual_seed(part.seed)
    extent = int(part.way)
    shape = settings.steps, settings.windows * (settings.window // extent) ** 2
    at = corners(TRAINING, extent, world.shape[1], shape, part.seed).to(world.device)
    model = nn.Sequential(encoder(settings), head()).to(world.device)
    loss, mesh = weighted(world), mural.init(spatial=(1, 1))

    def gradients(step: int) -> Tensor:
        labels = turned(cut(world, at[step], extent), step)
        with in_half(world):
            scores = model(mural.shard(as_input(labels), mesh))
            value = loss(scores, mural.shard(labels.long(), mesh, dims=(1, 2)))
        value.backward()
        mural.reduce_gradients(model, mesh)
        return value

    return model, trained(model, part.rate, settings.steps, gradients)


def on_domains(part: Part, settings: Settings, world: Tensor) -> tuple[nn.Module, list[float]]:
    """The network of a part and its losses, trained on labels of the source, with the images of targets or without."""
    torch.manual_seed(part.seed)
    extent, loss = settings.domain_window, weighted(world)
    network = separation_network(settings).to(world.device)
    shape, alone, whole = (settings.domain_steps, settings.domain_batch), network.predictor(), network.loss(loss)
    at = {
        name: corners((name,), extent, world.shape[1], shape, len(CONTINENTS) * part.seed + number).to(world.device)
        for number, name in enumerate(network.domains)
    }

    def labels_of(name: str, step: int) -> Tensor:
        return turned(cut(world, at[name][step], extent), step)

    def source_only(step: int) -> Tensor:
        labels = labels_of(SOURCE, step)
        with in_half(world):
            value = loss(alone(as_input(labels)), labels.long())
        value.backward()
        return value

    def separation(step: int) -> Tensor:
        network.at(step)
        images = {name: as_input(labels_of(name, step)) for name in network.domains}
        with in_half(world):
            value = whole(network(*network.arranged(images)), labels_of(SOURCE, step).long())
        value.backward()
        return value

    ways = {"source-only": (alone, source_only), "separation": (network, separation)}
    model, gradients = ways[part.way]
    return alone, trained(model, part.rate, settings.domain_steps, gradients)


def in_half(world: Tensor) -> torch.autocast:
    """Half precision, on a GPU."""
    return torch.autocast(world.device.type, torch.bfloat16, enabled=world.is_cuda)


def trained(model: nn.Module, rate: float, steps: int, gradients: Callable[[int], Tensor]) -> list[float]:
    """The losses of a training, as a few points; `gradients` leaves those of a step, and gives its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-4)
    losses: list[Tensor] = []
    for step, now in enumerate(schedule(steps, rate).tolist()):
        for group in optimizer.param_groups:
            group["lr"] = now
        optimizer.zero_grad()
        losses.append(gradients(step).detach())
        optimizer.step()
    model.eval()
    return [float(some.mean()) for some in torch.stack(losses).chunk(POINTS)]
