"""Accelerate: model and optimizer are prepared, the loader is not; two ranks share each image, two pairs the batch.

    torchrun --nproc-per-node 4 examples/12_accelerate.py

It needs Accelerate (pip install accelerate). A prepared model averages its gradients over all ranks, and that is the
gradient of one device. A prepared loader would give every rank images of its own; `ImageSampler` gives the ranks of one
image the same. The losses are those of example 01.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from scenes import batch
from torch.utils.data import DataLoader, TensorDataset

import mural
from mural.data import ImageSampler
from mural.models import UNet

IMAGES_PER_RANK, STEPS = 2, 5


def main() -> None:
    accelerator = Accelerator(cpu=True)
    mesh = mural.init(data=2, spatial=(2,))  # joins Accelerate's process group
    torch.manual_seed(0)
    model = UNet(width=8, depth=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)  # not the loader

    scenes = TensorDataset(*batch())
    sampler = ImageSampler(scenes, mesh)
    loader = DataLoader(scenes, IMAGES_PER_RANK, sampler=sampler)
    for epoch in range(STEPS):
        sampler.set_epoch(epoch)
        for images, masks in loader:
            x = mural.shard(images.to(accelerator.device), mesh, batch="own")
            target = mural.shard(masks.to(accelerator.device), mesh, dims=(1, 2), batch="own")
            loss = F.cross_entropy(model(x), target)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.print(f"step {epoch + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
