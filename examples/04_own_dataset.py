"""Your own dataset: no image is ever whole in memory; each rank computes (or reads) its own box.

    torchrun --nproc-per-node 4 examples/04_own_dataset.py

A dataset is anything with a length and samples; a sample's image is a file, an array, or a source: an object that can
give any box of itself. Here the source computes its pixels; yours may come from a microscope's format.
The losses are those of example 03.
"""

import torch
import torch.nn.functional as F
from scenes import COLUMNS, IMAGES, ROWS, scene
from torch import Tensor

import mural
from mural.data import Box, ComputedSource, Loader, Sample
from mural.models import UNet

PLAN = mural.Plan(data=2, spatial=(2, 1))
STEPS = 5


def source(number: int, mask: bool) -> ComputedSource:
    """An image, or its mask, of which any box can be computed."""

    def compute(box: Box) -> Tensor:
        pixels, classes = scene(number, *box[1:])
        return classes[None] if mask else pixels

    shape, dtype = (1 if mask else 3, ROWS, COLUMNS), torch.int64 if mask else torch.float32
    return ComputedSource(compute, shape, dtype, f"scene {number}")


class Scenes:
    """Four scenes with their masks."""

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> Sample:
        return Sample(f"scene {index}", source(index, mask=False), source(index, mask=True))


def main() -> None:
    torch.manual_seed(0)
    pm = mural.parallelize(UNet(width=8, depth=3), PLAN, loss=F.cross_entropy)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)

    loader = Loader(Scenes(), pm.mesh, batch=IMAGES, shuffle=False)
    for step in range(1, STEPS + 1):
        for batch in loader.epoch(step):
            loss = pm.step(batch.image, batch.target)
            optimizer.step()
            pm.zero_grad()
            if pm.mesh.rank == 0:
                print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
