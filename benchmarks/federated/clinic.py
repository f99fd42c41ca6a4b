"""One clinic: its share of the digits, its local training, its part in the federation."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mural.federated import Federation, Patience, federation

TEST = 400
BATCH = 16


@dataclass(frozen=True)
class Setting:
    """A federation: the relative sizes of its clinics, and what is different about it."""

    seed: int
    rounds: int
    shares: tuple[int, ...]
    masked: bool = False
    away: float = 0.0
    """The part of rounds that a clinic sits out."""
    skew: float = 0.0
    """The part of a clinic's samples that are of two classes of its own."""
    rate: float = 0.05
    noise: bool = False
    """Whether samples are replaced by noise, of the same number."""


def model_of(setting: Setting) -> nn.Module:
    """The network with four layers of units: 64, 64, 32 and 10."""
    torch.manual_seed(setting.seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def digits(setting: Setting) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels for training, then for the test, in an order that the seed decides."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(setting.seed).permutation(len(labels))
    x, y = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    return x[TEST:], y[TEST:], x[:TEST], y[:TEST]


def division(setting: Setting) -> list[Tensor]:
    """The numbers of the training samples that each clinic has; every sample is in one clinic."""
    _, labels, _, _ = digits(setting)
    count, total = len(labels), sum(setting.shares)
    sizes = [count * share // total for share in setting.shares]
    sizes[-1] = count - sum(sizes[:-1])
    free = torch.ones(count, dtype=torch.bool)
    found: list[Tensor] = []
    for clinic, size in enumerate(sizes):
        own = torch.isin(labels, torch.tensor([2 * clinic % 10, (2 * clinic + 1) % 10]))
        favoured = torch.nonzero(free & own).flatten()[: int(size * setting.skew)]
        free[favoured] = False
        others = torch.nonzero(free).flatten()[: size - len(favoured)]
        free[others] = False
        found.append(torch.cat([favoured, others]))
    return found


def train(model: nn.Module, x: Tensor, y: Tensor, rate: float, seed: int) -> None:
    """One epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for part in torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, setting: Setting) -> float:
    """The part of the test images that are named rightly."""
    _, _, x, y = digits(setting)
    return float((model(x).argmax(1) == y).double().mean())


def central(setting: Setting) -> float:
    """The accuracy of the same model that was trained on all samples in one place, for as many epochs."""
    model, (x, y, _, _) = model_of(setting), digits(setting)
    for epoch in range(setting.rounds):
        train(model, x, y, setting.rate, epoch)
    return accuracy(model, setting)


def alone(clinic: int, setting: Setting) -> float:
    """The accuracy of the same model that was trained on one clinic's samples alone."""
    model, (x, y, _, _), own = model_of(setting), digits(setting), division(setting)[clinic]
    for epoch in range(setting.rounds):
        train(model, x[own], y[own], setting.rate, epoch)
    return accuracy(model, setting)


def take_part(clinic: int, setting: Setting, address: str, folder: str) -> None:
    """In a process of its own: take part in the federation, and write what came of it."""
    torch.set_num_threads(1)
    x, y, _, _ = digits(setting)
    own = division(setting)[clinic]
    x, y = x[own], y[own]
    if setting.noise:
        generator = torch.Generator().manual_seed(999 + clinic)
        x, y = torch.rand(x.shape, generator=generator), torch.randint(10, y.shape, generator=generator)
    handed = listen()
    clinics = len(setting.shares)
    quorum = 3 if setting.masked else 1
    member = Federation(
        f"clinic {clinic}",
        address,
        Patience(expected=clinics, quorum=quorum, seconds=20.0),
        host=clinic == 0,
        masked=setting.masked,
        say=lambda _: None,
    )
    model = model_of(setting)
    model = run(member, model, setting, clinic, x, y)
    state = b"".join(t.numpy().tobytes() for t in model.state_dict().values())
    result: dict[str, Any] = {
        "accuracy": accuracy(model, setting),
        "digest": hashlib.sha256(state).hexdigest(),
        "samples": len(y),
        "rounds": len(member.history),
        "handed": "".join(digest for digest, _ in handed),
        "tensors": len(handed),
        "values": sum(count for _, count in handed),
    }
    (Path(folder) / f"{clinic}.json").write_text(json.dumps(result))


def run(member: Federation, model: nn.Module, setting: Setting, clinic: int, x: Tensor, y: Tensor) -> nn.Module:
    """All rounds; in some, a clinic sits out."""
    draw = np.random.default_rng(1000 + clinic + 100 * setting.seed)
    absent = draw.random(setting.rounds) < setting.away

    def local(model: nn.Module, number: int) -> int:
        if absent[number]:
            return 0
        train(model, x, y, setting.rate, number)
        return len(y)

    return member.run(model, setting.rounds, local)


def listen() -> list[tuple[str, int]]:
    """A list that gets the digest and size of every tensor that the federation hands to the network."""
    found: list[tuple[str, int]] = []
    for name in ("all_reduce", "broadcast"):
        plain = getattr(federation, name)

        def told(tensor: Tensor, *rest: Any, plain: Any = plain) -> Tensor:
            found.append((hashlib.sha256(tensor.numpy().tobytes()).hexdigest(), tensor.numel()))
            return plain(tensor, *rest)

        setattr(federation, name, told)
    return found
