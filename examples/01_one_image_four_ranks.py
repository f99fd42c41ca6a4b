"""One image on four ranks: a U-Net learns an image that is cut into a 2 × 2 grid.

    torchrun --nproc-per-node 4 examples/01_one_image_four_ranks.py

The loss is that of the whole image, the same on every rank. On one process the script prints the same losses:

    python examples/01_one_image_four_ranks.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import mural
from mural.models import UNet

ROWS, COLUMNS, STEPS = 256, 384, 5


def scene() -> tuple[Tensor, Tensor]:
    """An image (1, 3, rows, columns) of blobs on a texture, and its mask (1, rows, columns)."""
    down = torch.arange(ROWS).view(-1, 1)
    across = torch.arange(COLUMNS).view(1, -1)
    mask = (torch.sin(down / 20) * torch.cos(across / 25) > 0.3).long()[None]
    texture = torch.stack([(down * a + across * b) % 17 / 17 for a, b in ((3, 5), (7, 2), (1, 11))])
    return mask[:, None] * 0.5 + texture[None], mask


def main() -> None:
    mesh = mural.init(image=(ROWS, COLUMNS))  # chooses the grid: 2 × 2 on four ranks
    torch.manual_seed(0)  # every rank builds the same parameters
    model = UNet(width=8, depth=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    image, mask = scene()
    x = mural.shard(image, mesh)  # each rank keeps its piece
    target = mural.shard(mask, mesh, dims=(1, 2))
    if mesh.rank == 0:
        print(mesh)
        print(f"x is {tuple(x.shape)}; rank 0 holds {tuple(x.local.shape)}")

    for step in range(1, STEPS + 1):
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        mural.reduce_gradients(model, mesh)
        optimizer.step()
        if mesh.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
