"""The pairs of model and plan that are replayed: small models under plans of every family.

Where `exact` is said, weights, images and targets are small whole numbers and nothing but sums, products, ReLUs, pools
and means over powers of two is computed: float64 rounds nothing, so the loss has the same bits on every machine and
under every plan. Norms, softmax and cross-entropy round, and kernels for other CPUs round otherwise: there the digits
are compared to a part in 10¹¹.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural import Plan
from replay import models

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Pair:
    """A model under a plan, and the images and targets of its steps."""

    build: str
    """The name of what builds the model, in `replay.models`."""
    plan: Plan
    shape: tuple[int, ...] = (2, 3, 16, 16)
    target: str = "numbers"
    """"numbers" and "mask": one for each position; "class": one for each image; "domains": the same."""
    classes: int = 3
    exact: bool = False
    fused: bool = False
    """Whether halos of layers that follow each other are fetched at once; else never: costs would decide."""

    def loss(self, model: Any) -> Loss:
        """What is trained."""
        if self.build == "Several" or self.target == "domains":
            return models.several_loss if self.build == "Several" else model.loss(F.cross_entropy)
        return F.mse_loss if self.target == "numbers" else F.cross_entropy

    def model(self) -> nn.Module:
        """The model, with the same weights on every rank."""
        torch.manual_seed(0)
        model = getattr(models, self.build)().double()
        if self.exact:
            generator = torch.Generator().manual_seed(1)
            for p in model.parameters():
                p.data = whole_numbers(tuple(p.shape), generator)
        return model

    def batch(self, step: int) -> tuple[Any, Any]:
        """Images and targets of a step."""
        generator = torch.Generator().manual_seed(step)
        if self.target == "domains":
            images = tuple(drawn_numbers((count, 1, 8, 8), generator) for count in (2, 3))
            return images, torch.randint(0, 3, (2,), generator=generator)
        image = (whole_numbers if self.exact else drawn_numbers)(self.shape, generator)
        if self.target == "numbers":
            return image, whole_numbers((self.shape[0], 4, *self.shape[2:]), generator)
        extents = self.shape[2:] if self.target == "mask" else ()
        target = torch.randint(0, self.classes, (self.shape[0], *extents), generator=generator)
        if self.build == "Several":
            return (image, torch.randint(0, 2, (self.shape[0], *extents), generator=generator)), target
        return image, target


def whole_numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers -1, 0 and 1, mostly 0."""
    return torch.randint(-2, 3, shape, generator=generator).div(2, rounding_mode="trunc").double()


def drawn_numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


UP = ("up.0",)
ALEX = (3, 1, 28, 24)

PAIRS: dict[str, Pair] = {
    "data-batchnorm": Pair("batch_unet", Plan(data=2), (5, 3, 16, 16), "mask"),
    "data-ring": Pair("Chain", Plan(data=4, all_reduce="ring"), (4, 3, 16, 16), exact=True),
    "data-average": Pair("Chain", Plan(data=2, average=2), (4, 3, 16, 16), exact=True),
    "spatial-rows": Pair("Chain", Plan(spatial=(2, 1)), exact=True),
    "spatial-columns": Pair("resnet", Plan(spatial=(1, 2)), (2, 3, 40, 40), "class"),
    "spatial-grid": Pair("instance_unet", Plan(spatial=(2, 2)), (1, 3, 19, 23), "mask"),
    "spatial-odd": Pair("instance_unet", Plan(spatial=(3, 1)), (1, 3, 19, 12), "mask"),
    "spatial-thin": Pair("Chain", Plan(spatial=(4, 1)), exact=True),
    "spatial-volume": Pair("Volume", Plan(spatial=(2, 1, 1)), (1, 1, 8, 6, 4), "mask", 2),
    "spatial-fused": Pair("plain_unet", Plan(spatial=(2, 1)), exact=True, fused=True),
    "spatial-attention": Pair("Transformer", Plan(spatial=(2, 1)), (2, 3, 16, 16), "class"),
    "spatial-rank-norm": Pair("batch_unet", Plan(spatial=(2, 1), batchnorm="rank"), target="mask"),
    "data-spatial-dropout": Pair("Dropped", Plan(data=2, spatial=(2, 1)), exact=True),
    "stages-sequential": Pair("plain_unet", Plan(stage=2, cuts=UP), exact=True),
    "stages-gpipe": Pair(
        "plain_unet", Plan(stage=2, schedule="gpipe", microbatches=4, cuts=UP), (4, 3, 16, 16), exact=True
    ),
    "stages-1f1b": Pair(
        "plain_unet", Plan(stage=3, schedule="1f1b", microbatches=4, cuts=("down.1", "up.0")), (4, 3, 16, 16),
        exact=True,
    ),
    "stages-interleaved": Pair(
        "plain_unet", Plan(stage=2, schedule="interleaved", microbatches=3, cuts=("down.0", "down.1", "up.0")),
        (4, 3, 16, 16), exact=True,
    ),
    "stages-seats": Pair("plain_unet", Plan(stage=2, seats=(0, 1, 0), cuts=("down.0", "up.1")), exact=True),
    "stages-tied": Pair(
        "Tied", Plan(stage=2, schedule="1f1b", microbatches=2, cuts=("second",), batchnorm="micro"), target="mask"
    ),
    "stages-fan": Pair("Fan", Plan(stage=3, cuts=("b", "d")), target="mask"),
    "stages-several": Pair("Several", Plan(stage=2, microbatches=2, schedule="gpipe", cuts=("b",)), target="mask"),
    "stages-dropout": Pair(
        "Dropped", Plan(stage=2, data=2, microbatches=2, schedule="1f1b", cuts=("middle",)), (4, 3, 16, 16), exact=True
    ),
    "stages-spatial": Pair(
        "plain_unet", Plan(stage=2, spatial=(2, 1), microbatches=2, schedule="1f1b", cuts=UP), exact=True
    ),
    "stages-grids": Pair(
        "plain_unet", Plan(stage=2, grids=((3, 1), (1, 1)), microbatches=2, schedule="gpipe", cuts=UP), exact=True
    ),
    "stages-recompute": Pair("plain_unet", Plan(stage=2, recompute="stages", cuts=UP), exact=True),
    "gems-lean": Pair(
        "plain_unet", Plan(stage=2, schedule="gems", gems="lean", microbatches=4, cuts=UP), (4, 3, 16, 16), exact=True
    ),
    "gems-interleaved": Pair(
        "plain_unet", Plan(stage=2, schedule="gems", microbatches=4, replications=2, cuts=UP), (4, 3, 16, 16),
        exact=True,
    ),
    "channel-linear": Pair("lenet", Plan(channel=2), (5, 1, 28, 24), "class"),
    "channel-all": Pair(
        "alexnet", Plan(channel=2, spatial=(2, 1), channel_exchange="part", channel_layers="all"), ALEX, "class"
    ),
    "domain": Pair("domains", Plan(domain=2), target="domains"),
    "stream": Pair("Chain", Plan(stream=(5, 7)), exact=True),
    "stream-norms": Pair("group_unet", Plan(stream=(8, 8)), (1, 3, 20, 18), "mask"),
    "stream-classes": Pair("resnet", Plan(stream=(32, 32)), (2, 3, 64, 64), "class"),
    "stream-dropout": Pair("Dropped", Plan(stream=(8, 8)), exact=True),
    "stream-ranks": Pair("batch_unet", Plan(stream=(8, 8), spatial=(2, 1)), (2, 3, 32, 20), "mask"),
    "stream-recompute": Pair("plain_unet", Plan(stream=(8, 8), recompute="all"), exact=True),
    "stream-fcn": Pair("fcn", Plan(stream=(24, 24)), (1, 3, 40, 40), "mask"),
    "recompute": Pair("instance_unet", Plan(spatial=(2, 1), recompute="all"), (1, 3, 19, 12), "mask"),
    "offload": Pair("plain_unet", Plan(offload=("activations", "parameters")), exact=True),
    "combined": Pair(
        "plain_unet", Plan(data=2, spatial=(2, 1), recompute=("down.0",), offload=("activations",)), exact=True
    ),
}  # fmt: skip
