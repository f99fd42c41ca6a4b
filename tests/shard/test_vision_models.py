"""The classifiers and transformers of mural.models under the law, small and at odd extents.

Dropout is off: plain torch draws other masks. Norms are in training, so widths and extents leave enough numbers to
normalize: with two images of one or two positions each, the image's last bits alone move plain gradients by 1e-10.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mural.models as models
from law import Grid, holds, image, some

GRIDS = [Grid((2, 1)), Grid((2, 2)), Grid((1, 2), data=2)]

VIT = partial(models.ViT, classes=5, width=12, depth=2, heads=3, patch=4, extents=(24, 32))
SWIN = partial(models.Swin, classes=5, width=4, depths=(2, 2), heads=(1, 2), patch=2, window=3)

CONVOLUTIONAL: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Perceptron": (lambda: models.Perceptron(3 * 13 * 11, 9, 7, 5), (2, 3, 13, 11)),
    "LeNet5": (lambda: models.LeNet5(3, 5, (29, 34)), (2, 3, 29, 34)),
    "AlexNet": (lambda: models.alexnet(classes=5, width=2, dropout=0.0), (2, 3, 131, 99)),
    "AlexNet at its smallest": (lambda: models.alexnet(classes=5, width=2, dropout=0.0), (2, 3, 63, 63)),
    "VGG-11 with norms": (lambda: models.vgg11(classes=5, width=2, batch_norm=True, dropout=0.0), (2, 3, 67, 75)),
    "VGG-19": (lambda: models.vgg19(classes=5, width=2, dropout=0.0), (2, 3, 67, 45)),
    "DenseNet": (lambda: models.DenseNet(classes=5, width=4, growth=2, blocks=(2, 3, 2)), (2, 3, 61, 47)),
    "ResNet-20 v2": (lambda: models.resnet_v2(20, classes=5, width=4), (2, 3, 37, 31)),
    "ResNet-20 v2 of Keras": (lambda: models.resnet_v2(20, classes=5, width=2, variant="keras"), (2, 3, 37, 31)),
    "Inception-v3": (lambda: models.inception_v3(classes=5, width=2, aux=False, dropout=0.0), (2, 3, 139, 153)),
}
TRANSFORMERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "ViT": (VIT, (2, 3, 24, 32)),
    "ViT of other extents": (VIT, (2, 3, 37, 27)),
    "ViT mean": (partial(VIT, pool="mean"), (2, 3, 37, 27)),
    "ViT pixels": (partial(VIT, head="pixels"), (2, 3, 37, 27)),
    "ViT pixels mean": (partial(VIT, head="pixels", pool="mean"), (2, 3, 37, 27)),
    "Swin": (SWIN, (2, 3, 36, 24)),
    "Swin of odd extents": (SWIN, (2, 3, 37, 43)),
    "Swin pixels": (partial(SWIN, head="pixels"), (2, 3, 37, 43)),
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
    "DenseNet-121": (lambda: models.densenet121(classes=5, width=4, growth=2), (2, 3, 97, 83)),
    "ResNet-110 v2": (lambda: models.resnet110_v2(classes=5, width=4), (2, 3, 37, 31)),
    "Inception-v3 with auxiliary scores": (
        lambda: models.inception_v3(classes=5, width=2, dropout=0.0),
        (2, 3, 301, 299),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", DEEP)
def test_all_layers(name: str, grid: Grid) -> None:
    build, shape = DEEP[name]
    holds(seeded(build), image(*shape), grid)
