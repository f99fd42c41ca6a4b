"""One device: a U-Net learns four images, in one process.

    python examples/01_one_device.py

The examples that follow change one thing each, and print the same losses.
"""

import torch
import torch.nn.functional as F
from scenes import batch

import mural
from mural.models import UNet

PLAN = mural.Plan()
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
