"""Two classes of images: scikit-image's faces, and what is no face; and the loader of the batches drawn from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SEED = 2
HELD_OUT = 20
"""Images of each class that are for validation."""
MISSING = 'the images come with scikit-image: pip install "mural-train[samples]"'


@dataclass(frozen=True)
class Faces:
    """Images (N, 3, side, side) with their labels, for training and for validation."""

    images: Tensor
    labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor


def faces(side: int) -> Faces:
    """The images at that size; which are held out is always the same."""
    try:
        from skimage.data import lfw_subset  # noqa: PLC0415 (an optional package)
    except ImportError as error:
        raise ImportError(MISSING) from error
    # The first 100 are faces, the last 100 are not.
    grey = torch.from_numpy(lfw_subset()).float()[:, None]
    labels = (torch.arange(len(grey)) >= 100).long()
    draws = torch.Generator().manual_seed(SEED)
    order = torch.cat([kind[torch.randperm(100, generator=draws)] for kind in torch.arange(200).view(2, 100)])
    last = torch.arange(200) % 100 >= 100 - HELD_OUT
    rest, held = order[~last], order[last]
    grey = (grey - grey[rest].mean()) / grey[rest].std()
    large = F.interpolate(grey, (side, side), mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    return Faces(large[rest], labels[rest], large[held], labels[held])


class Draws(Dataset[tuple[Tensor, Tensor]]):
    """Batches of images drawn with repetition, half of them mirrored: those of all epochs, one after the other."""

    def __init__(self, found: Faces, batch: int, steps: int) -> None:
        draws = torch.Generator().manual_seed(SEED)
        self.found = found
        self.places = torch.randint(len(found.images), (steps, batch), generator=draws)
        self.mirrored = torch.rand((steps, batch), generator=draws) < 0.5

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        places, mirrored = self.places[step], self.mirrored[step]
        images = self.found.images[places]
        images[mirrored] = images[mirrored].flip(-1)
        return images, self.found.labels[places]


def loader(found: Faces, batch: int, steps: int, pinned: bool) -> DataLoader[tuple[Tensor, Tensor]]:
    """The batches of that many steps, in pinned memory or not."""
    return DataLoader(Draws(found, batch, steps), batch_size=None, pin_memory=pinned)
