"""Data × spatial: two ranks share each image, and two such pairs share the batch.

    torchrun --nproc-per-node 4 examples/03_data_and_spatial.py

Only the plan differs from example 02. The losses are the same, and so are gradients and BatchNorm's statistics.
"""

import torch
import torch.nn.functional as F
from scenes import batch

import mural
from mural.models import UNet

PLAN = mural.Plan(data=2, spatial=(2, 1))
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
