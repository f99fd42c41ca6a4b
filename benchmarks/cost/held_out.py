"""The held-out list: models and blocks whose time and memory are predicted, and that no fit has seen.

It was committed before the first fit and does not change with it. The fit learns from single layers of random sizes
(`sweep.py`); here are whole models and blocks of models, as their authors wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness.vision import timm, torchvision
from torch import Tensor, nn

from mural import models

Shape = tuple[int, ...]


def conv_norm(inputs: int, outputs: int, *kernels: tuple[int, int], stride: int = 1) -> nn.Sequential:
    """AmoebaNet's convolution: ReLU, then convolutions, each with a batch norm behind it."""
    layers: list[nn.Module] = [nn.ReLU()]
    for index, kernel in enumerate(kernels):
        padding = (kernel[0] // 2, kernel[1] // 2)
        steps = stride if index == 0 else 1
        layers += [nn.Conv2d(inputs if index == 0 else outputs, outputs, kernel, steps, padding, bias=False)]
        layers += [nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers)


class AmoebaCell(nn.Module):
    """A normal cell of AmoebaNet-D, as GPipe and torchgpipe have it: five pairs of operations, four of them joined."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.before = conv_norm(inputs, channels, (1, 1))
        self.now = conv_norm(inputs, channels, (1, 1))
        quarter = channels // 4
        seven = nn.Sequential(
            conv_norm(channels, quarter, (1, 1)),
            conv_norm(quarter, quarter, (1, 7), (7, 1)),
            conv_norm(quarter, channels, (1, 1)),
        )
        plain = nn.Identity
        pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.pairs = nn.ModuleList([
            nn.ModuleList([nn.MaxPool2d(3, 1, 1), conv_norm(channels, channels, (1, 1))]),
            nn.ModuleList([plain(), seven]),
            nn.ModuleList([conv_norm(channels, channels, (1, 1)), plain()]),
            nn.ModuleList([conv_norm(channels, channels, (1, 1)), pool]),
            nn.ModuleList([plain(), conv_norm(channels, channels, (3, 3))]),
        ])  # fmt: skip
        self.reads = ((1, 1), (1, 0), (1, 0), (1, 1), (0, 3))

    def forward(self, features: Tensor) -> Tensor:
        states = [self.before(features), self.now(features)]
        for (left, right), (first, second) in zip(self.pairs, self.reads, strict=True):
            states.append(left(states[first]) + right(states[second]))
        return torch.cat(states[3:], 1)


class ConvNeXtBlock(nn.Module):
    """A depthwise k7, a norm over the channels, and two linear layers with a GELU between, beside the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, features: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(features).permute(0, 2, 3, 1))
        return features + (self.scale * self.narrow(F.gelu(self.wide(inner)))).permute(0, 3, 1, 2)


class InvertedResidual(nn.Module):
    """MobileNet's block: wide, depthwise k3, narrow, with SiLU and squeeze-and-excite, beside the input."""

    def __init__(self, channels: int, expansion: int = 4) -> None:
        super().__init__()
        wide = channels * expansion
        self.wide = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.squeeze, self.excite = nn.Conv2d(wide, channels // 4, 1), nn.Conv2d(channels // 4, wide, 1)
        self.narrow = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, features: Tensor) -> Tensor:
        inner = self.depthwise(self.wide(features))
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(inner.mean((2, 3), keepdim=True)))))
        return features + self.narrow(inner * gate)


class Classified(nn.Module):
    """A segmentation model with its loss, so that the loss is predicted too; the mask is made on the way."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        scores = self.model(image)
        target = torch.zeros((scores.shape[0], *scores.shape[2:]), dtype=torch.int64, device=scores.device)
        return F.cross_entropy(scores, target)


@dataclass(frozen=True)
class Held:
    """A model or block, and the inputs at which it is measured on each kind of device.

    `half` are the inputs at which it is measured in bfloat16 on a GPU.
    """

    name: str
    build: Callable[[], nn.Module]
    cpu: tuple[Shape, ...] = ()
    cuda: tuple[Shape, ...] = ()
    half: tuple[Shape, ...] = ()


HELD_OUT = (
    Held(
        "U-Net, width 64",
        lambda: models.UNet2D(width=64),
        cuda=((1, 3, 512, 512), (1, 3, 1024, 1024), (1, 3, 2560, 2560)),
        half=((1, 3, 1024, 1024), (1, 3, 3072, 3072)),
    ),
    Held("U-Net, width 16", lambda: models.UNet2D(width=16), cpu=((1, 3, 256, 256), (2, 3, 160, 224))),
    Held(
        "U-Net, width 12, residual, instance norm, interpolated, with loss",
        lambda: Classified(models.UNet2D(width=12, depth=3, norm="instance", block="residual", upsample="interpolate")),
        cpu=((1, 3, 192, 192),),
        cuda=((4, 3, 1024, 1024),),
    ),
    Held(
        "3D U-Net, width 8",
        lambda: models.UNet3D(in_channels=1, width=8, depth=3),
        cpu=((1, 1, 32, 48, 48),),
        cuda=((1, 1, 128, 128, 128),),
    ),
    Held(
        "ResNet-18",
        torchvision.models.resnet18,
        cpu=((1, 3, 224, 224), (4, 3, 128, 128)),
        cuda=((32, 3, 224, 224), (1, 3, 2048, 2048)),
        half=((64, 3, 224, 224),),
    ),
    Held(
        "ResNet-50",
        torchvision.models.resnet50,
        cpu=((1, 3, 224, 224),),
        cuda=((32, 3, 224, 224), (1, 3, 1536, 1536), (2, 3, 256, 256)),
        half=((32, 3, 320, 320),),
    ),
    Held(
        "ResNet-50, middle block",
        lambda: torchvision.models.resnet.Bottleneck(512, 128),
        cpu=((4, 512, 28, 28),),
        cuda=((16, 512, 96, 96),),
    ),
    Held("ResNet-110-v2", models.resnet110_v2, cpu=((8, 3, 32, 32),), cuda=((512, 3, 32, 32),)),
    Held(
        "DenseNet-121",
        torchvision.models.densenet121,
        cpu=((1, 3, 160, 160),),
        cuda=((16, 3, 224, 224), (1, 3, 1280, 1280)),
        half=((16, 3, 256, 256),),
    ),
    Held(
        "DenseNet block of 6",
        lambda: torchvision.models.densenet._DenseBlock(6, 64, 4, 32, 0.0),
        cpu=((2, 64, 56, 56),),
        cuda=((8, 64, 112, 112),),
    ),
    Held(
        "VGG-11",
        torchvision.models.vgg11,
        cpu=((1, 3, 192, 192),),
        cuda=((32, 3, 224, 224), (1, 3, 1600, 1600)),
        half=((32, 3, 224, 224),),
    ),
    Held(
        "AmoebaNet-D cell, 208 channels",
        lambda: AmoebaCell(416, 208),
        cpu=((1, 416, 28, 28),),
        cuda=((4, 416, 128, 128), (1, 416, 512, 512)),
        half=((4, 416, 128, 128),),
    ),
    Held(
        "AmoebaNet-D cell, 64 channels",
        lambda: AmoebaCell(128, 64),
        cpu=((2, 128, 48, 48),),
        cuda=((8, 128, 256, 256),),
    ),
    Held(
        "Inception block 5",
        lambda: torchvision.models.inception.InceptionA(256, 64),
        cpu=((2, 256, 35, 35),),
        cuda=((32, 256, 70, 70),),
    ),
    Held(
        "Inception block 6",
        lambda: torchvision.models.inception.InceptionC(768, 160),
        cpu=((1, 768, 17, 17),),
        cuda=((16, 768, 64, 64),),
    ),
    Held(
        "ViT tiny",
        lambda: timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True),
        cpu=((2, 3, 224, 224),),
        cuda=((64, 3, 224, 224), (2, 3, 1024, 1024)),
        half=((128, 3, 224, 224),),
    ),
    Held(
        "ViT block, width 384",
        lambda: timm.models.vision_transformer.Block(384, 6, qkv_bias=True),
        cpu=((2, 197, 384),),
        cuda=((16, 1025, 384),),
    ),
    Held(
        "Swin, two stages",
        lambda: timm.models.SwinTransformer(depths=(2, 2), num_heads=(3, 6), drop_path_rate=0.0, strict_img_size=False),
        cpu=((1, 3, 112, 112),),
        cuda=((16, 3, 448, 448),),
    ),
    Held(
        "ConvNeXt blocks, width 96",
        lambda: nn.Sequential(*(ConvNeXtBlock(96) for _ in range(3))),
        cpu=((1, 96, 56, 56),),
        cuda=((4, 96, 256, 256),),
        half=((8, 96, 224, 224),),
    ),
    Held(
        "Inverted residuals, width 40",
        lambda: nn.Sequential(*(InvertedResidual(40) for _ in range(3))),
        cpu=((2, 40, 56, 56),),
        cuda=((16, 40, 192, 192),),
    ),
)
