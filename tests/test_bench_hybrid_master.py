"""A master that updates for all: the steps of one device, weights in the order of layers, state on one rank."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mural
from hybrid_modules import master_worker
from mural.errors import PlanError
from mural.models import UNet
from ranks import run_on

Master = master_worker.Master


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return UNet(in_channels=3, classes=2, width=4, depth=2).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=generator)
    return image, torch.randint(2, (4, 16, 16), generator=generator)


def trained(options: dict[str, Any], chunks: int, root: int) -> tuple[float, int, int]:
    """The largest difference of weights from one device after three steps, chunks, and tensors of optimizer state."""
    mesh = mural.init(**options)
    plain, model, (image, target) = model_of(), model_of(), batch()
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
    ours = torch.optim.Adam(model.parameters(), lr=0.01)
    master = Master(model, ours, mesh, chunks=chunks, root=root)
    for _ in range(3):
        theirs.zero_grad()
        F.cross_entropy(plain(image), target).backward()
        theirs.step()
        ours.zero_grad()
        shards = mural.shard(image, mesh), mural.shard(target, mesh, dims=(1, 2))
        F.cross_entropy(model(shards[0]), shards[1]).backward()
        master.step()
    state = model.state_dict()
    gap = max(float((state[k].double() - v.double()).abs().max()) for k, v in plain.state_dict().items())
    master.close()
    return gap, len(master.chunks), sum(len(s) for s in ours.state.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "chunks", "root"),
    [({"data": 2}, 4, 0), ({"data": 3}, 1, 2), ({"data": 2, "spatial": (2, 1)}, 7, 1), ({}, 3, 0)],
    ids=str,
)
def test_steps_are_those_of_one_device(options: dict[str, Any], chunks: int, root: int) -> None:
    world = options.get("data", 1) * options.get("spatial", (1,))[0]
    for rank, (gap, found, state) in enumerate(run_on(world, trained, options, chunks, root)):
        assert gap < 1e-10
        assert min(chunks, 6) <= found <= chunks
        assert (state > 0) == (rank == root or world == 1)


class Layers(nn.Module):
    """Layers that note, after each, whether an event has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.event = threading.Event()
        self.noted: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            self.noted.append(self.event.is_set())
        return x


def overlap() -> list[bool]:
    """Whether the last layer's weights had arrived, after each layer of the forward that follows a step."""
    mesh = mural.init(data=2)
    model = Layers()
    master = Master(model, torch.optim.SGD(model.parameters(), 0.1), mesh, chunks=4)
    model(torch.ones(1, 64)).sum().backward()
    last = master.down[-1]
    carry_out = master_worker.run

    def hesitant(collective: Any, flat: torch.Tensor, team: Any) -> torch.Tensor:
        if collective is last and mesh.rank == 0:
            time.sleep(1.0)  # the others run what they have meanwhile
        return carry_out(collective, flat, team)

    master_worker.run = hesitant  # type: ignore[assignment]
    try:
        master.step()
        model.event, model.noted = master.arrived[-1], []
        model(torch.ones(1, 64))
        master.close()
    finally:
        master_worker.run = carry_out
    return model.noted


def test_the_forward_waits_for_its_own_weights_alone() -> None:
    assert run_on(2, overlap)[1] == [False, False, False, True]


def counted(chunks: int) -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    master = Master(model, torch.optim.SGD(model.parameters(), 0.1), mural.init(data=3), chunks=chunks)
    found = master.traffic()
    master.close()
    return found.messages, found.bytes


def test_traffic_is_counted_from_what_runs() -> None:
    # To and from every worker once, in chunks: (N - 1) up, with a flag for each of 12 parameters, and (N - 1) down.
    for chunks in (1, 3):
        assert run_on(3, counted, chunks) == [(2 * 2 * chunks, 2 * (2 * 6 * 72 + 12) * 4)] * 3


class Tied(nn.Module):
    """A parent that reads a child's weight, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(64, 64)
        self.unused = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.outer(x), self.inner.weight) + F.linear(x, self.inner.weight)


def other_weights_and_readers() -> float:
    """The distance from one device, where ranks begin with other weights, and a parent reads its child's weight."""
    mesh = mural.init(data=2)
    torch.manual_seed(0)
    plain = Tied().double()
    torch.manual_seed(mesh.rank)  # the master has the weights of the plain model
    model = Tied().double()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    theirs, ours = torch.optim.SGD(plain.parameters(), **options), torch.optim.SGD(model.parameters(), **options)
    master = Master(model, ours, mesh, chunks=3)
    x = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    carry_out = master_worker.run

    def hesitant(collective: Any, flat: torch.Tensor, team: Any) -> torch.Tensor:
        time.sleep(0.1)  # a forward that does not wait reads old weights
        return carry_out(collective, flat, team)

    master_worker.run = hesitant  # type: ignore[assignment]
    try:
        for _ in range(3):
            theirs.zero_grad()
            plain(x).square().mean().backward()
            theirs.step()
            ours.zero_grad()
            model(mural.shard(x, mesh, dims=())).square().mean().backward()
            master.step()
        state = model.state_dict()
        master.close()
    finally:
        master_worker.run = carry_out
    return max(float((state[k] - v).abs().max()) for k, v in plain.state_dict().items())


@pytest.mark.slow
def test_any_call_waits_for_the_weights_that_it_reads() -> None:
    assert max(run_on(2, other_weights_and_readers)) < 1e-10


def test_bad_settings_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="at least one"):
        Master(model, torch.optim.SGD(model.parameters(), 0.1), mural.init(), chunks=0)
