"""Checks of plans over MPI: data, channel and hybrid plans, ways to add up gradients, a master; several steps each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from mpi_values import DEVICE, size
from torch import Tensor, nn

import mural
from hybrid_modules import master_worker
from law import difference, image
from mural.models import LeNet5, UNet

STEPS = 3
HYBRIDS: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({"data": 2}, {"channel": 2}, {"channel": 2, "channel_layers": "all", "channel_exchange": "part"}),
    4: (
        {"data": 4},
        {"channel": 4},
        {"data": 2, "channel": 2},
        {"data": 2, "channel": 2, "channel_layers": "all", "channel_exchange": "rank"},
        {"data": 2, "channel": 2, "all_reduce": "ring"},
    ),
}
"""By the number of ranks, plans for a network with convolutions and linear layers."""
ADDED: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({"data": 2, "all_reduce": "ring"}, {"data": 2, "all_reduce": "tree"}),
    4: (
        {"data": 4, "all_reduce": "ring"},
        {"data": 4, "all_reduce": "tree"},
        {"data": 4, "all_reduce": "butterfly"},
        {"data": 2, "spatial": (2, 1), "all_reduce": "ring"},
        {"data": 2, "spatial": (1, 2), "all_reduce": "auto"},
    ),
}
"""Plans for a network of convolutions, each with a way in which gradients are added up."""


class Momentum:
    """Gradient descent with momentum, as torch has it; torch.optim would load torch's compiler, for many seconds."""

    def __init__(self, parameters: Iterable[Tensor]):
        self.param_groups = [{"params": list(parameters)}]
        self.state: dict[Tensor, Tensor] = {}

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p] = 0.9 * self.state[p] + p.grad if p in self.state else p.grad.clone()
                p -= 0.05 * self.state[p]


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images and one class for each: five, which no number of ranks divides."""
    return image(5, 1, 32, 32, seed=seed).to(DEVICE), (torch.arange(5) * 3 + seed).remainder(10).to(DEVICE)


def scenes(seed: int) -> tuple[Tensor, Tensor]:
    """Images and a class for each position."""
    return image(5, 3, 19, 16, seed=seed).to(DEVICE), (image(5, 19, 16, seed=seed + 9) > 0).long().to(DEVICE)


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return LeNet5().double().to(DEVICE)


def unet() -> nn.Module:
    torch.manual_seed(0)
    return UNet(width=4, depth=1).double().to(DEVICE)


def alike(plain: nn.Module, state: dict[str, Tensor], what: object) -> None:
    """Raise unless a state is that of a model on one device."""
    found = {name: difference(state[name].to(value), value) for name, value in plain.state_dict().items()}
    wrong = {name: gap for name, gap in found.items() if not gap <= 1e-10}
    assert not wrong, f"{what}: {wrong}"


def trained(make: Any, batch: Any, options: dict[str, Any]) -> None:
    """Train a model under a plan and on one device."""
    plain = make()
    pm = mural.parallelize(make(), mural.Plan(**options), loss=F.cross_entropy)
    theirs, ours = Momentum(plain.parameters()), Momentum(pm.parameters())
    for step in range(STEPS):
        x, target = batch(step)
        theirs.zero_grad()
        pm.zero_grad()
        expected = F.cross_entropy(plain(x), target)
        expected.backward()
        assert difference(pm.step(x, target).to(expected), expected) <= 1e-10, f"{options}: loss of step {step}"
        theirs.step()
        ours.step()
    alike(plain, pm.state_dict(), options)


def data_channel_and_hybrid_plans_train_as_one_device() -> None:
    for options in HYBRIDS[size()]:
        trained(lenet, digits, options)


def gradients_added_up_in_every_way_train_as_one_device() -> None:
    for options in ADDED[size()]:
        trained(unet, scenes, options)


def a_master_trains_as_one_device() -> None:
    for options in ({"data": size()}, {"data": 2, "spatial": (size() // 2, 1)}):
        mesh = mural.init(**options)
        plain, model = unet(), unet()
        theirs, ours = Momentum(plain.parameters()), Momentum(model.parameters())
        master = master_worker.Master(model, ours, mesh, chunks=3, root=size() - 1)  # type: ignore[arg-type]
        for step in range(STEPS):
            x, target = scenes(step)
            theirs.zero_grad()
            F.cross_entropy(plain(x), target).backward()
            theirs.step()
            ours.zero_grad()
            parts = mural.shard(x, mesh), mural.shard(target, mesh, dims=(1, 2))
            F.cross_entropy(model(parts[0]), parts[1]).backward()
            master.step()
        state = model.state_dict()
        master.close()
        alike(plain, state, options)
        assert bool(ours.state) == (mesh.rank == size() - 1), "the optimizer's state is on the master alone"
