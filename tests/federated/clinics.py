"""Clinics for tests: processes that train a small model on samples of their own, and say what they ended with."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from mural.federated import Federation, Patience


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def samples_of(clinic: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unequal numbers of samples, others in every clinic."""
    generator = torch.Generator().manual_seed(100 + clinic)
    count = 6 + 5 * clinic
    return (
        torch.randn(count, 4, dtype=torch.float64, generator=generator),
        torch.randint(3, (count,), generator=generator),
    )


def local_steps(model: nn.Module, clinic: int, rate: float = 0.1) -> int:
    inputs, labels = samples_of(clinic)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return len(labels)


def main() -> None:
    """A clinic from the command line: a JSON of settings."""
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    clinic, out = int(settings["clinic"]), Path(settings["out"])
    federation = Federation(
        f"clinic {clinic}",
        settings["address"],
        Patience(**settings["patience"]),
        host=settings["host"],
        masked=settings["masked"],
        timeout=settings["timeout"],
    )

    def local(model: nn.Module, number: int) -> int:
        if number == settings.get("dies"):
            os._exit(7)
        if number == settings.get("fails"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        if number == settings.get("slow"):
            time.sleep(float(settings["seconds"]))
        (out / f"began-{clinic}-{number}").touch()
        return local_steps(model, clinic)

    (out / f"starts-{clinic}").touch()
    try:
        model = federation.run(model_of(seed=clinic), settings["rounds"], local)
    except RuntimeError as error:
        (out / f"error-{clinic}").write_text(f"{type(error).__name__}: {error}")
        time.sleep(settings.get("lingers", 0))  # with the error's trace in its hands
        raise
    history = [(r.number, r.attempt, sorted(r.members), r.samples) for r in federation.history]
    torch.save({"state": model.state_dict(), "history": history, "version": federation.version}, out / f"{clinic}.pt")


if __name__ == "__main__":
    main()
