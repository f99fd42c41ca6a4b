"""Stages: the model is cut along its depth, and each rank holds one half of it.

    torchrun --nproc-per-node 2 examples/07_stages.py

Only the plan differs from example 02. mural chooses the cut, so that both halves need about the same memory. The skips
of the U-Net travel from one half to the other. Before the first step, the plan is proved on a small case: `pm.proof` is
what was proved. The losses are the same.
"""

import torch
import torch.nn.functional as F
from scenes import batch

import mural
from mural.models import UNet

PLAN = mural.Plan(stage=2)
STEPS = 5


def main() -> None:
    torch.manual_seed(0)
    pm = mural.parallelize(UNet(width=8, depth=3), PLAN, loss=F.cross_entropy, prove=True)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)

    images, masks = batch()
    for step in range(1, STEPS + 1):
        loss = pm.step(images, masks)  # forward and backward
        optimizer.step()
        pm.zero_grad()
        if pm.mesh.rank == 0:
            if step == 1:
                print(pm.proof)
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
