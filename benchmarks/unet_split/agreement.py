"""A small U-Net in stages beside one device: loss, gradients, buffers and weights after three steps, in float64.

Run by the benchmark on its ranks, or under MPI: `mpirun -n 2 python benchmarks/unet_split/agreement.py cuda`.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from mural.models import UNet
from mural.plans import Plan

STEPS = 3
PLANS: dict[str, Plan] = {
    **{
        f"{stages} stages, {schedule}": Plan(
            stage=stages,
            schedule=schedule,
            microbatches=4,
            batchnorm="micro",  # pyright: ignore[reportArgumentType]
        )
        for stages in (2, 3, 4)
        for schedule in ("gpipe", "1f1b", "gems")
    },
    "spatial (2, 1) × 2 stages": Plan(stage=2, spatial=(2, 1)),
    "horizontal": Plan(stage=3, seats=(0, 1, 2, 1, 0), cuts=("down.0", "down.1", "up.0", "up.1")),
    "2 stages, blocks recomputed": Plan(stage=2, recompute="all"),
    "2 stages, recomputed": Plan(stage=2, recompute="stages"),
}


def difference(plan: Plan, device: torch.device, side: int = 32, mesh: Any = None) -> dict[str, Any]:
    """The largest differences relative to the largest value: of the losses, gradients, and the state in the end."""
    torch.manual_seed(3)
    model = UNet(width=4, depth=2).double().to(device)
    generator = torch.Generator().manual_seed(1)
    images = 2 * plan.microbatches if plan.microbatches > 1 else 2
    image = torch.randn(images, 3, side, side, dtype=torch.float64, generator=generator).to(device)
    target = torch.randint(2, (images, side, side), generator=generator).to(device)
    plain = copy.deepcopy(model)
    expected, wanted = alone(plain, image, target, plan.microbatches)
    pm = mural.parallelize(model, plan, loss=F.cross_entropy, mesh=mesh)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for _ in range(STEPS):
        pm.zero_grad()
        losses.append(float(pm.step(image, target)))
        grads = {name: p.grad.clone() for name, p in pm.named_parameters() if p.grad is not None}
        optimizer.step()
    state, final = pm.state_dict(), plain.state_dict()
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "gradients": apart(grads, wanted),
        "state": apart(state, final),
    }


def alone(model: nn.Module, image: Tensor, target: Tensor, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the steps on one device, a loop over micro-batches, and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    grads: dict[str, Tensor] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for images, goals in zip(image.chunk(parts), target.chunk(parts), strict=True):
            loss = F.cross_entropy(model(images), goals) * len(images) / len(image)
            loss.backward()
            total += float(loss)
        losses.append(total)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of what was found, relative to the largest wanted value of all."""
    largest = max(float(t.double().abs().max()) for t in wanted.values())
    return (
        max((float((found[k].cpu().double() - wanted[k].cpu().double()).abs().max()) for k in found), default=0.0)
        / largest
    )


def main() -> None:
    """Under MPI: two stages, on the device that the argument names."""
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    plan = Plan(stage=2, schedule="1f1b", microbatches=2, batchnorm="micro")
    mesh = mural.init(stage=2, backend="mpi")
    found = difference(plan, device, mesh=mesh)
    if mesh.rank == 0:
        print("over MPI, 2 stages, 1f1b:", found, mesh.transport.describe(), flush=True)


if __name__ == "__main__":
    main()
