"""Checks of models over MPI: the law, training, and the error of one rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi_values import DEVICE, rank, size
from torch import Tensor, nn

import mural
from law import Expr, Grid, compare, image
from mural.errors import PeerError, UnsupportedOp
from mural.models import UNet


def the_law_holds() -> None:
    torch.manual_seed(0)
    cases: list[tuple[nn.Module, Tensor]] = [
        (UNet(width=4, depth=2).double(), image(2, 3, 41, 36)),
        (
            nn.Sequential(nn.Conv2d(3, 4, 5, stride=2, padding=2), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2)).double(),
            image(2, 3, 33, 27),
        ),
        (nn.ConvTranspose2d(3, 2, 3, stride=2).double(), image(2, 3, 17, 12)),
        (Expr("F.scaled_dot_product_attention(x, x, x)"), image(2, 3, 12, 8)),
    ]
    four = (Grid((2, 2), device=DEVICE), Grid((2, 1), data=2, device=DEVICE), Grid((4,), device=DEVICE))
    two = (Grid((2, 1), device=DEVICE), Grid((1,), data=2, device=DEVICE))
    for grid in four if size() == 4 else two:
        for module, x in cases:
            found = compare(module, [x], grid)
            wrong = {name: value for name, value in found.items() if not value <= 1e-10}
            assert not wrong, f"{grid}: {wrong}"


class Synchronous:
    """A communicator whose sends complete only when their receives have come."""

    def __init__(self, communicator: Any):
        self.communicator, self.Isend = communicator, communicator.Issend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.communicator, name)


def nothing_relies_on_buffers() -> None:
    operations = Grid((2, size() // 2)).mesh().transport.group.operations
    communicator, operations.communicator = operations.communicator, Synchronous(operations.communicator)
    try:
        the_law_holds()
    finally:
        operations.communicator = communicator


def training_gives_the_weights_of_one_device() -> None:
    grid = Grid((size() // 2, 1), data=2)
    torch.manual_seed(3)
    plain, sharded = (UNet(width=4, depth=2).double().to(DEVICE) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    for model in (plain, sharded):
        for step in range(4):
            x, target = (
                image(3, 3, 40, 44, seed=step).to(DEVICE),
                (image(3, 40, 44, seed=step + 50) > 0).long().to(DEVICE),
            )
            if model is sharded:
                loss = F.cross_entropy(model(grid.shard(x)), grid.shard(target, dims=(1, 2)))
            else:
                loss = F.cross_entropy(model(x), target)
            model.zero_grad()
            loss.backward()
            if model is sharded:
                mural.reduce_gradients(model, grid.mesh())
            with torch.no_grad():  # torch.optim would load torch's compiler first, for many seconds
                for p in model.parameters():
                    p -= 0.1 * p.grad
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-9


def ddp_runs_over_it() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain.load_state_dict(model.state_dict())
    ddp = nn.parallel.DistributedDataParallel(model)
    batch = image(size() * 3, 6)
    for wrapped, part in ((ddp, batch[3 * rank() : 3 * rank() + 3]), (plain, batch)):
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(part).square().mean().backward()
            optimizer.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-10


def a_lone_error_reaches_the_others() -> None:
    """Last: afterwards the mesh is of no use."""
    mesh = Grid((2, size() // 2)).mesh()
    x = mural.shard(image(1, 3, 16, 16).to(DEVICE), mesh)
    conv = nn.Conv2d(3, 3, 3, padding=1).double().to(DEVICE)

    class Broken(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return torch.fft.fft(y) if rank() == 1 else conv(conv(conv(y)))

    begun = time.monotonic()
    with pytest.raises(UnsupportedOp if rank() == 1 else PeerError) as caught:
        Broken()(x)
    assert rank() == 1 or "rank 1 raised UnsupportedOp" in str(caught.value)
    assert time.monotonic() - begun < 20
