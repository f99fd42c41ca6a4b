"""GPU to GPU: every image is cut over as many GPUs as there are ranks, and halos travel between them over NCCL.

    torchrun --nproc-per-node 2 examples/09_gpu_to_gpu.py

Only the mesh over NCCL and the device differ from example 02. Nothing passes through the host. Ranks may share one
GPU too, to try it: messages then go through sockets, slowly.
"""

import torch
import torch.nn.functional as F
from scenes import COLUMNS, ROWS, batch

import mural
from mural.models import UNet

STEPS = 5


def main() -> None:
    mesh = mural.init(image=(ROWS, COLUMNS), backend="nccl")
    torch.manual_seed(0)
    plan = mural.Plan(spatial=mesh.spatial)
    pm = mural.parallelize(UNet(width=8, depth=3), plan, loss=F.cross_entropy, mesh=mesh, device="cuda")
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    if mesh.rank == 0:
        print(mesh)

    images, masks = (tensor.cuda() for tensor in batch())
    for step in range(1, STEPS + 1):
        loss = pm.step(images, masks)  # forward and backward
        optimizer.step()
        pm.zero_grad()
        if mesh.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
