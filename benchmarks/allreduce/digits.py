"""The experiment of Fourie (2019) on handwritten digits: does the algorithm of the all-reduce change the accuracy?

A network of four layers (64 inputs, 32 and W hidden units, 10 outputs, tanh between them) learns scikit-learn's
digits for 20 epochs on P ranks, each with every P-th training image. Either the weights are averaged after each
epoch, as there, or the gradients in each step. The original lost 7 to 10% of accuracy with rings and did not find why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mural.collectives import all_reduce
from mural.collectives.algorithms import ALGORITHMS
from mural.collectives.choose import BACKEND

EPOCHS, BATCH, RATE, HIDDEN = 20, 4, 0.1, 32
TEST_SHARE = 5
"""Every fifth image is kept for the test."""

ALONE = "one rank"

Average = Callable[[Tensor], Tensor]
"""Takes this rank's values in a row, and gives the mean over ranks, or what a faulty average makes of them."""


@cache
def images(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, and those of the test; read once."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit('the digits come with scikit-learn: pip install "mural-train[test]"') from error
    data, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(data / 16.0, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    test = torch.arange(len(y)) % TEST_SHARE == 0
    return x[~test].to(device), y[~test].to(device), x[test].to(device), y[test].to(device)


def network(width: int, seed: int) -> nn.Sequential:
    """The four layers, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, width), nn.Tanh(), nn.Linear(width, 10))


def epoch(model: nn.Module, x: Tensor, y: Tensor, order: Tensor, reduce: Average | None, rate: float) -> None:
    """One pass over a rank's images by gradient descent; with `reduce`, gradients are averaged in each step."""
    parameters = list(model.parameters())
    for batch in order.split(BATCH):
        loss = F.cross_entropy(model(x[batch]), y[batch])
        found = torch.autograd.grad(loss, parameters)
        if reduce is not None:
            row = reduce(torch.cat([g.reshape(-1) for g in found]))
            found = [
                part.view_as(p) for part, p in zip(row.split([p.numel() for p in parameters]), parameters, strict=True)
            ]
        with torch.no_grad():
            for p, g in zip(parameters, found, strict=True):
                p -= rate * g


def trained(
    width: int, seed: int, what: str, average: Average, rank: int, ranks: int, epochs: int, device: str = "cpu"
) -> tuple[float, int]:
    """The accuracy of this rank's network in the end, and the bytes of a message."""
    x, y, test, labels = images(device)
    model = network(width, seed).to(device)
    mine = torch.arange(rank, len(y) - len(y) % (ranks * BATCH), ranks)  # as many on every rank
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    row = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for _ in range(epochs):
        order = mine[torch.randperm(len(mine), generator=draw)]
        epoch(model, x, y, order, average if what == "gradients" else None, RATE)
        if what == "weights":
            row = average(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
            nn.utils.vector_to_parameters(row, model.parameters())
    with torch.no_grad():
        good = (model(test).argmax(1) == labels).float().mean().item()
    return good, row.nbytes


def ways(ranks: int) -> dict[str, Average]:
    """Every algorithm, and the backend's own; one rank averages nothing."""
    if ranks == 1:
        return {ALONE: lambda row: row}
    return {name: lambda row, name=name: all_reduce(row, name, average=True) for name in (*ALGORITHMS, BACKEND)}


def measure(
    rank: int, kinds: dict[str, list[int]], seeds: list[int], epochs: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Every algorithm on the ranks at hand, for the widths of each kind."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    records: list[dict[str, Any]] = []
    for what, width in [(what, width) for what, widths in kinds.items() for width in widths]:
        for name, average in ways(ranks).items():
            found = [trained(width, seed, what, average, rank, ranks, epochs, device) for seed in seeds]
            about = {"ranks": ranks, "what": what, "width": width, "algorithm": name, "bytes": found[0][1]}
            records.append(about | {"accuracy": [good for good, _ in found]})
            if rank == 0:
                mean = sum(records[-1]["accuracy"]) / len(seeds)
                print(f"digits: {ranks} ranks, {what}, width {width}, {name}: {100 * mean:.2f}%", flush=True)
    return records
