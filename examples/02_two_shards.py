"""Two shards: every image is cut in two, and each rank holds one half.

    torchrun --nproc-per-node 2 examples/02_two_shards.py

Only the plan differs from example 01. The losses are the same.
"""

import torch
import torch.nn.functional as F
from scenes import batch

import mural
from mural.models import UNet

PLAN = mural.Plan(spatial=(2, 1))
STEPS = 5


def main() -> None:
    torch.manual_seed(0)
    pm = mural.parallelize(UNet(width=8, depth=3), PLAN, loss=F.cross_entropy)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)

    images, masks = batch()
    for step in range(1, STEPS + 1):
        loss = pm.step(images, masks)  # forward and backward
        optimizer.step()
        pm.zero_grad()
        if pm.mesh.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
