"""Published classifiers and transformers under the law, small and at odd extents.

Dropout is off: plain torch draws other masks. Norms are in training, so widths and extents leave enough numbers to
normalize: with two images of one or two positions each, the image's last bits alone move plain gradients by 1e-10.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.vision import narrowed, timm
from torch import Tensor, nn

import mural.models as models
from law import Grid, holds, image, some
from zoo import dense, swin

GRIDS = [Grid((2, 1)), Grid((2, 2)), Grid((1, 2), data=2)]


class ViT(timm.models.vision_transformer.VisionTransformer):
    """timm's, with positions interpolated in their own dtype: timm's float32 rounds their gradients."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        batch, rows, columns, width = x.shape
        first = self.num_prefix_tokens
        places = self.pos_embed[:, first:].transpose(1, 2).unflatten(2, self.patch_embed.grid_size)
        places = F.interpolate(places, size=(rows, columns), mode="bicubic", antialias=True)
        places = torch.cat([self.pos_embed[:, :first], places.flatten(2).transpose(1, 2)], 1)
        tokens = [] if self.cls_token is None else [self.cls_token.expand(batch, -1, -1)]
        return torch.cat([*tokens, x.view(batch, -1, width)], 1) + places


class Pixels(nn.Module):
    """Scores of each pixel by a transformer's features: those of each level, enlarged to the image, and added."""

    def __init__(self, net: nn.Module, *widths: int) -> None:
        super().__init__()
        self.net = net
        self.heads = nn.ModuleList(nn.Conv2d(width, 5, 1) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        scores = [head(level) for head, level in zip(self.heads, self.levels(x), strict=True)]
        return sum(F.interpolate(each, size=x.shape[2:], mode="bilinear") for each in scores)  # type: ignore[return-value]

    def levels(self, x: Tensor) -> list[Tensor]:
        """The last features of a ViT, or those of both stages of a Swin."""
        net: Any = self.net
        if hasattr(net, "forward_intermediates"):
            return net.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)
        first = net.features[:2](x)
        return [level.permute(0, 3, 1, 2) for level in (first, net.features[2:](first))]


INCEPTION = partial(narrowed, "inception_v3", 16, 5, dropout=0.0, init_weights=False)
VIT = partial(
    ViT, (24, 32), 4, num_classes=5, embed_dim=12, depth=2, num_heads=3, dynamic_img_size=True, dynamic_img_pad=True
)
MEAN = {"class_token": False, "global_pool": "avg", "fc_norm": False}
SWIN = partial(swin, 4, [2, 2], [1, 2], patch=2)

CONVOLUTIONAL: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Perceptron": (lambda: models.Perceptron(3 * 13 * 11, 9, 7, 5), (2, 3, 13, 11)),
    "LeNet5": (lambda: models.LeNet5(3, 5, (29, 34)), (2, 3, 29, 34)),
    "AlexNet": (lambda: narrowed("alexnet", 32, 5, dropout=0.0), (2, 3, 131, 99)),
    "AlexNet at its smallest": (lambda: narrowed("alexnet", 32, 5, dropout=0.0), (2, 3, 63, 63)),
    "VGG-11 with norms": (lambda: narrowed("vgg11_bn", 32, 5, dropout=0.0), (2, 3, 67, 75)),
    "VGG-19": (lambda: narrowed("vgg19", 32, 5, dropout=0.0), (2, 3, 67, 45)),
    "DenseNet": (lambda: dense(4, 2, (2, 3, 2)), (2, 3, 61, 47)),
    "ResNet-20 v2": (lambda: models.resnet_v2(20, classes=5, width=4), (2, 3, 37, 31)),
    "ResNet-20 v2 of Keras": (lambda: models.resnet_v2(20, classes=5, width=2, variant="keras"), (2, 3, 37, 31)),
    "Inception-v3": (partial(INCEPTION, aux_logits=False), (2, 3, 139, 153)),
}
TRANSFORMERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "ViT": (VIT, (2, 3, 24, 32)),
    "ViT of other extents": (VIT, (2, 3, 37, 27)),
    "ViT mean": (partial(VIT, **MEAN), (2, 3, 37, 27)),
    "ViT pixels": (lambda: Pixels(VIT(), 12), (2, 3, 37, 27)),
    "ViT pixels mean": (lambda: Pixels(VIT(**MEAN), 12), (2, 3, 37, 27)),
    "Swin": (SWIN, (2, 3, 36, 24)),
    "Swin of odd extents": (SWIN, (2, 3, 37, 43)),
    "Swin pixels": (lambda: Pixels(SWIN(), 4, 8), (2, 3, 37, 43)),
}


def seeded(build: Any) -> nn.Module:
    torch.manual_seed(3)
    return build().double()


@pytest.mark.parametrize("grid", some(GRIDS, 0), ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutional(name: str, grid: Grid) -> None:
    build, shape = CONVOLUTIONAL[name]
    holds(seeded(build), image(*shape), grid)


@pytest.mark.parametrize("grid", some(GRIDS, 0), ids=str)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str, grid: Grid) -> None:
    build, shape = TRANSFORMERS[name]
    holds(seeded(build), image(*shape), grid)


DEEP: dict[str, tuple[Any, tuple[int, ...]]] = {
    "DenseNet-121": (lambda: dense(4, 2, (6, 12, 24, 16)), (2, 3, 97, 83)),
    "ResNet-110 v2": (lambda: models.resnet110_v2(classes=5, width=4), (2, 3, 37, 31)),
    "Inception-v3 with auxiliary scores": (INCEPTION, (2, 3, 301, 299)),
}


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", DEEP)
def test_all_layers(name: str, grid: Grid) -> None:
    build, shape = DEEP[name]
    holds(seeded(build), image(*shape), grid)
