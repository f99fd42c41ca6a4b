"""Own pieces: the calls underneath a plan, by hand, for a training script that you already have.

    torchrun --nproc-per-node 4 examples/06_own_pieces.py

`scene` takes the place of a reader that can read a box of a file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import mural
from mural.models import UNet

ROWS, COLUMNS, STEPS = 256, 384, 5

Span = tuple[int, int]


def scene(rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
    """The pixels (1, 3, …) and the mask (1, …) of one box of example 01's image."""
    down = torch.arange(*rows).view(-1, 1)
    across = torch.arange(*columns).view(1, -1)
    mask = (torch.sin(down / 20) * torch.cos(across / 25) > 0.3).long()[None]
    texture = torch.stack([(down * a + across * b) % 17 / 17 for a, b in ((3, 5), (7, 2), (1, 11))])
    return mask[:, None] * 0.5 + texture[None], mask


def main() -> None:
    mesh = mural.init(image=(ROWS, COLUMNS))
    torch.manual_seed(0)  # every rank builds the same parameters
    model = UNet(width=8, depth=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    at = mesh.coordinates
    rows = mural.Cuts.even(ROWS, mesh.size("spatial0")).interval(at["spatial0"])
    columns = mural.Cuts.even(COLUMNS, mesh.size("spatial1")).interval(at["spatial1"])
    image, mask = scene(rows, columns)
    x = mural.shard(image, mesh, box=((0, 1), (0, 3), rows, columns))
    target = mural.shard(mask, mesh, dims=(1, 2), box=((0, 1), rows, columns))
    if mesh.rank == 0:
        print(mesh)
        print(f"x is {tuple(x.shape)}; rank 0 made {tuple(image.shape)}")

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
