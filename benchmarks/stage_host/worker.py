"""The time of steps under two stages, on two ranks of this machine; prints a line of JSON for each model and plan.

Images are small and the batch has two of them, so that the host is what takes time: Python, rules, messages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.vision import narrowed, torchvision

import mural
from mural.models import UNet

try:
    from mural.ranks import run_local
except ImportError:  # a version from before, under --other
    from mural.comm import run_local  # type: ignore[attr-defined,no-redef]

MODELS: dict[str, tuple[Any, int, bool]] = {
    "U-Net": (lambda: UNet(width=16, depth=4, norm="group"), 64, True),
    "ResNet-50": (lambda: narrowed("resnet50", 4, classes=10), 64, False),
    "DenseNet-121": (lambda: torchvision.models.densenet121(num_classes=10), 64, False),
}
PLANS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 2, 1F1B, 2 micro-batches": {
        "stage": 2,
        "schedule": "1f1b",
        "microbatches": 2,
        "batchnorm": "micro",
    },
}


def measured(rank: int, device: str, rounds: int) -> None:
    """Measure every model under every plan on a rank; rank 0 prints the lines."""
    torch.set_num_threads(1)
    for name in MODELS:
        for plan, options in PLANS.items():
            times = seconds(device, name, options, rounds)
            if rank == 0:
                row = {"model": name, "plan": plan, "milliseconds": 1000 * statistics.median(times)}
                print(json.dumps(row), flush=True)


def seconds(device: str, name: str, options: dict[str, Any], rounds: int) -> list[float]:
    """The seconds of steps, after three that do not count."""
    torch.manual_seed(0)
    make, extent, mask = MODELS[name]
    image = torch.rand(2, 3, extent, extent, device=device)
    target = torch.zeros((2, extent, extent) if mask else (2,), dtype=torch.int64, device=device)
    pm = mural.parallelize(make().to(device), mural.Plan(**options), image=(3, extent, extent))
    found: list[float] = []
    for _ in range(rounds + 3):
        begun = time.perf_counter()
        pm.step(image, target)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
        pm.zero_grad()
    return found[3:]


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    run_local(measured, 2, given.device, given.rounds)


if __name__ == "__main__":
    main()
