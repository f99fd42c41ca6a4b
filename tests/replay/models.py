"""The models of the pairs: most of their own, so that no other test changes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.domain import Ramp, Separation, SeparationNetwork, classification_network
from mural.models import FCN2D, LeNet5, UNet2D


class Chain(nn.Module):
    """Convolutions with every kind of window, a skip, and pools: only sums and products."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Conv2d(3, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.down = nn.Conv2d(4, 6, 5, stride=2, padding=2)
        self.strip = nn.Conv2d(4, 6, (3, 1), stride=2, padding=(1, 0))
        self.pool, self.mean = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)
        self.up = nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.wide(self.inward(x).relu())
        x = self.down(skip).relu() + self.strip(skip) + self.pool(skip).mean(1, keepdim=True)
        x = self.up(self.mean(F.pad(x, (1, 1, 1, 1), mode="reflect")))
        return self.last(torch.cat([F.interpolate(x, skip.shape[2:]), skip], 1))


class Dropped(nn.Module):
    """Random layers of several kinds between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.middle, self.last = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 4), (4, 4)))
        self.some, self.channels = nn.Dropout(0.5), nn.Dropout2d(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.some(self.inward(x).relu())
        x = self.channels(self.middle(x)) + torch.rand_like(x).round()
        return self.last(self.some(x))


class Tied(nn.Module):
    """Two convolutions that share their weight, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.first, self.second = (nn.Conv2d(a, 4, 3, padding=1) for a in (3, 4, 4))
        self.second.weight = self.first.weight
        self.norm, self.twice, self.head = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.norm(self.first(self.inward(x))).relu())
        return self.head(self.twice(self.second(x).tanh()))


class Fan(nn.Module):
    """A value with several consumers far apart, and the image itself used late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(n, 4, 3, padding=1) for n in (3, 4, 4, 12))
        self.head = nn.Conv2d(7, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        a = self.a(image).relu()
        b = self.b(a) + a
        c = self.c(b) - a
        d = self.d(torch.cat([a, b, c], 1))
        return self.head(torch.cat([d + a, image], 1))


class Several(nn.Module):
    """Two inputs, and results of several stages in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(n, 4, 3, padding=1) for n in (3, 4, 4))
        self.early, self.head = nn.Conv2d(4, 3, 1), nn.Conv2d(5, 3, 1)

    def forward(self, image: Tensor, mask: Tensor) -> dict[str, Any]:
        a = self.a(image).relu()
        c = self.c(self.b(a).relu())
        return {"early": self.early(a), "out": self.head(torch.cat([c, mask[:, None].to(c.dtype)], 1))}


class Volume(nn.Module):
    """A residual unit as MONAI's networks have it, with PReLU, at two resolutions of a volume."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.norm, self.act = nn.Conv3d(1, 4, 3, 2, 1), nn.InstanceNorm3d(4, affine=True), nn.PReLU()
        self.same, self.beside = nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(1, 4, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose3d(4, 2, 3, 2, 1, 1), nn.Conv3d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.norm(self.inward(x)))
        inner = self.act(self.norm(self.same(inner))) + self.beside(x)
        return self.last(torch.cat([self.up(inner), x], 1))


class Transformer(nn.Module):
    """Patches, positions and a block of attention, as timm's vision transformers have them; classes by a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.last = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.LayerNorm(8)
        self.position = nn.Parameter(torch.linspace(-1, 1, 16 * 8).view(1, 16, 8))
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        count, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(count, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(count, tokens, width)
        x = x + self.out(mixed)
        return self.head((x + self.inner(self.last(x))).mean(1))


def several_loss(result: dict[str, Any], target: Tensor) -> Tensor:
    return F.cross_entropy(result["out"], target) + 0.3 * F.cross_entropy(result["early"], target)


def plain_unet() -> nn.Module:
    return UNet2D(classes=4, width=2, depth=2, norm=None)


def batch_unet() -> nn.Module:
    return UNet2D(classes=3, width=2, depth=2)


def instance_unet() -> nn.Module:
    return UNet2D(classes=3, width=2, depth=1, norm="instance", upsample="interpolate")


def group_unet() -> nn.Module:
    return UNet2D(classes=3, width=8, depth=1, norm="group", block="residual")


def resnet() -> nn.Module:
    """torchvision's, with a sixteenth of its channels; imported here, as ranks start faster without it."""
    from harness.vision import narrowed

    return narrowed("resnet18", 16, classes=5)


def fcn() -> nn.Module:
    return FCN2D(classes=3, width=1)


def lenet() -> nn.Module:
    return LeNet5(extents=(28, 24))


def alexnet() -> nn.Module:
    """Convolutions, a pool of windows of its own sizes, and linear layers of odd widths."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 7, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(63, 13), nn.ReLU(), nn.Linear(13, 3, bias=False),
    )  # fmt: skip


def domains() -> SeparationNetwork:
    """A separation network for two domains of images."""
    asked = Separation("scale-invariant", "adversary", ramp=Ramp(start=0, length=4))
    return classification_network(["one", "other"], 3, (1, 8, 8), code=5, width=2, separation=asked)
