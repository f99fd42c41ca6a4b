"""The training of `sampled_training.py` by Lightning or Accelerate, as a script for torchrun.

    torchrun --nproc-per-node 4 tests/trained_elsewhere.py lightning own image FOLDER

Arguments: the trainer; whether ranks say that their loaders give them the `whole` batch or their `own` images; the
sampler: `image`; `theirs`, which is what the trainer does with a loader by itself; or `boxes`, for mural's loader,
which reads each rank's box; the folder for what ranks found.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import mural

# isort: split
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from mural.data import ImageSampler, Loader
from sampled_training import BATCH, EPOCHS, Trained, made, optimizer_of

TRAINER, BROUGHT, SAMPLER, FOLDER = sys.argv[1:] if __name__ == "__main__" else ("", "", "", "")
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def mesh_of_ranks() -> mural.Mesh:
    return mural.init(data=RANKS // 2, spatial=(2,))


def loader_for(dataset: Any, mesh: mural.Mesh) -> DataLoader[Any]:
    if SAMPLER == "image":
        return DataLoader(dataset, BATCH // mesh.size("data"), sampler=ImageSampler(dataset, mesh))
    return DataLoader(dataset, 1, shuffle=True)


class Epochs:
    """A loader of mural as Lightning takes one, from the page on trainers."""

    def __init__(self, loader: Loader, trainer: pl.Trainer):
        self.loader, self.trainer = loader, trainer

    def __len__(self) -> int:
        return self.loader.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return ((batch.image, batch.target) for batch in self.loader.epoch(self.trainer.current_epoch))


def cut(pair: list[Tensor], mesh: mural.Mesh) -> tuple[Tensor, Tensor]:
    if SAMPLER == "boxes":
        return pair[0], pair[1]
    batch = cast('Literal["whole", "own"]', BROUGHT)
    return mural.shard(pair[0], mesh, batch=batch), mural.shard(pair[1], mesh, dims=(1, 2), batch=batch)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.unet, self.scenes = made()
        self.losses: list[float] = []

    def setup(self, stage: str) -> None:
        self.mesh = mesh_of_ranks()

    def train_dataloader(self) -> Any:
        if SAMPLER == "boxes":
            return Epochs(Loader(self.scenes, self.mesh, batch=BATCH, dtype=torch.float64), self.trainer)
        return loader_for(self.scenes, self.mesh)

    def val_dataloader(self) -> Any:
        return [] if SAMPLER == "boxes" else loader_for(self.scenes, self.mesh)

    def training_step(self, pair: list[Tensor], number: int) -> Tensor:
        image, mask = cut(pair, self.mesh)
        loss = F.cross_entropy(self.unet(image), mask)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, pair: list[Tensor], number: int) -> None:
        image, mask = cut(pair, self.mesh)
        self.log("val_loss", F.cross_entropy(self.unet(image), mask))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.unet)


def by_lightning() -> Trained:
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    module = Module()
    pl.Trainer(accelerator="cpu", devices=RANKS, strategy="ddp", max_epochs=EPOCHS, **off).fit(module)
    return module.losses, module.unet.state_dict()


def by_accelerate() -> Trained:
    accelerator = Accelerator(cpu=True)
    mesh = mesh_of_ranks()
    unet, dataset = made()
    model, optimizer = accelerator.prepare(unet, optimizer_of(unet))
    loader, losses = loader_for(dataset, mesh), list[float]()
    if SAMPLER == "theirs":
        loader = accelerator.prepare(loader)
    for epoch in range(EPOCHS):
        if isinstance(loader.sampler, ImageSampler):
            loader.sampler.set_epoch(epoch)
        for pair in loader:
            image, mask = cut(pair, mesh)
            loss = F.cross_entropy(model(image), mask)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses, unet.state_dict()


def main() -> None:
    warnings.simplefilter("ignore")
    try:
        found: Any = {"lightning": by_lightning, "accelerate": by_accelerate}[TRAINER]()
    except mural.LayoutError as error:
        found = str(error)
    torch.save(found, Path(FOLDER) / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
