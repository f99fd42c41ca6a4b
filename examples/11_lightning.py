"""Lightning: its trainer with `strategy="ddp"`; two ranks share each image, and two such pairs share the batch.

    python examples/11_lightning.py

Lightning (pip install pytorch-lightning) starts the four ranks. Its DDP averages gradients over all ranks, and that is
the gradient of one device. `ImageSampler` gives the ranks of one image the same sample. The losses are those of example
01.
"""

import mural  # before Lightning, which loads torchvision: one that was built for another torch loads after this alone

# isort: split
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from scenes import batch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from mural.data import ImageSampler
from mural.models import UNet

RANKS, IMAGES_PER_RANK, STEPS = 4, 2, 5


class Segmentation(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet(width=8, depth=3)

    def setup(self, stage: str) -> None:
        self.mesh = mural.init(data=2, spatial=(2,))  # joins Lightning's process group

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        scenes = TensorDataset(*batch())
        return DataLoader(scenes, IMAGES_PER_RANK, sampler=ImageSampler(scenes, self.mesh))

    def training_step(self, images_and_masks: list[Tensor], number: int) -> Tensor:
        images, masks = images_and_masks
        x = mural.shard(images, self.mesh, batch="own")
        target = mural.shard(masks, self.mesh, dims=(1, 2), batch="own")
        loss = F.cross_entropy(self.unet(x), target)
        self.print(f"step {self.global_step + 1}  loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Segmentation())


if __name__ == "__main__":
    main()
