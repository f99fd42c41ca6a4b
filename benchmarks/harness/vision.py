"""torchvision and timm, each imported when asked for, and torchvision's convolutional networks with fewer channels.

    from harness.vision import narrowed, timm, torchvision

mural comes first: with it, torchvision can be imported even where it was built for another torch.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import nn

import mural  # noqa: F401


def __getattr__(name: str) -> ModuleType:
    if name not in ("timm", "torchvision"):
        raise AttributeError(f"harness.vision has no {name}: it offers narrowed, timm and torchvision")
    return importlib.import_module(name)


def narrowed(name: str, times: int, classes: int = 1000, **options: Any) -> nn.Module:
    """The convolutional network of torchvision of that name with so many times fewer channels in every layer.

    The image keeps its 3 channels and the scores their classes. Convolutions are drawn as torchvision draws VGG's and
    ResNet's: `narrowed("alexnet", 8)` is AlexNet of width 8, `narrowed("vgg19", 16)` VGG-19 of width 4.
    """
    with torch.device("meta"):
        model: nn.Module = getattr(importlib.import_module("torchvision.models"), name)(num_classes=classes, **options)

    inner = {layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)}
    inner |= {layer.in_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)}
    if classes in inner:
        raise ValueError(f"{name} has an inner layer of {classes} channels, as many as classes: choose another number")

    def fewer(channels: int) -> int:
        return channels if channels in (3, classes) else channels // times

    for path, layer in list(model.named_modules()):
        match layer:
            case nn.Conv2d(in_channels=inputs, out_channels=outputs, bias=bias):
                shape = layer.kernel_size, layer.stride, layer.padding, layer.dilation
                thin = nn.Conv2d(fewer(inputs), fewer(outputs), *shape, bias=bias is not None)
                nn.init.kaiming_normal_(thin.weight, mode="fan_out", nonlinearity="relu")
            case nn.BatchNorm2d(num_features=channels):
                thin = nn.BatchNorm2d(fewer(channels), layer.eps, layer.momentum)
            case nn.Linear(in_features=inputs, out_features=outputs):
                thin = nn.Linear(fewer(inputs), fewer(outputs))
            case _:
                continue
        model.set_submodule(path, thin)
    return model
