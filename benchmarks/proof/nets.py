"""Ten models with the plans that they are proved under: those of `mural.models`, and two in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mural import Plan
from mural.models import CNN2D, FCN2D, UNet, UNet3D, amoebanetd, resnet_v2


class Attention(nn.Module):
    """A block of a vision transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.rest = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.rest(self.after(x))


class ViT(nn.Module):
    """A vision transformer with a position for each patch: it takes images of one size alone."""

    def __init__(self, side: int = 224, patch: int = 16, width: int = 192, depth: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(Attention(width, 3) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


class Block(nn.Module):
    """A block of a ConvNeXt; its branch begins at a millionth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.GroupNorm(1, width)
        self.wide, self.narrow = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.narrow(nn.functional.gelu(self.wide(self.norm(self.depthwise(x)))))


def convnext(width: int = 48, classes: int = 10) -> nn.Module:
    """A small ConvNeXt."""
    stages: list[nn.Module] = [nn.Conv2d(3, width, 4, 4)]
    for level in range(3):
        stages += [Block(width << level), Block(width << level), nn.Conv2d(width << level, width << level + 1, 2, 2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 3, classes))


def cnn() -> nn.Module:
    """A vanilla network that scores each position, brought to the size of the image."""
    return nn.Sequential(CNN2D(classes=2, head="positions"), nn.Upsample(scale_factor=4, mode="bilinear"))


@dataclass(frozen=True)
class Subject:
    """A model, the shape of its images, how many classes it tells apart, and a plan."""

    build: Callable[[], nn.Module]
    image: tuple[int, ...]
    plan: Plan
    classes: int = 2
    dense: bool = True
    """Whether each position has a class."""

    def batch(self, device: str) -> tuple[Tensor, Tensor]:
        """A batch of such images."""
        draws = torch.Generator(device).manual_seed(0)
        shape = (self.image[0], *self.image[2:]) if self.dense else self.image[:1]
        image: Any = torch.rand(self.image, generator=draws, device=device)
        return image, torch.randint(self.classes, shape, generator=draws, device=device)


MICRO = Plan(stage=2, microbatches=2, schedule="1f1b", batchnorm="micro")
SUBJECTS: dict[str, Subject] = {
    "CNN2D": Subject(cnn, (1, 3, 4096, 4096), Plan(stream=(1024, 1024))),
    "U-Net": Subject(lambda: UNet(width=64, depth=4), (1, 3, 4096, 4096), Plan(stream=(1024, 1024))),
    "U-Net, batch norm": Subject(
        lambda: UNet(width=32, depth=4, norm="batch"), (1, 3, 2048, 2048), Plan(stream=(512, 512))
    ),
    "U-Net 3D": Subject(lambda: UNet3D(1, width=16, depth=2), (1, 1, 192, 192, 192), Plan(stream=(64, 64, 64))),
    "FCN-8s": Subject(lambda: FCN2D(classes=2, dropout=0.0), (1, 3, 4096, 4096), Plan(stream=(1024, 1024))),
    "ConvNeXt": Subject(convnext, (1, 3, 2048, 2048), Plan(stream=(512, 512)), 10, False),
    "ViT": Subject(ViT, (4, 3, 224, 224), Plan(recompute="all"), 10, False),
    "AmoebaNet-D": Subject(lambda: amoebanetd(6, 64, 10), (2, 3, 1024, 1024), Plan(recompute="all"), 10, False),
    "U-Net, 2 ranks": Subject(lambda: UNet(width=32, depth=3, norm="batch"), (1, 3, 1024, 1024), Plan(spatial=(2, 1))),
    "ResNet-110": Subject(lambda: resnet_v2(110), (4, 3, 256, 256), MICRO, 10, False),
}
