"""The models that are measured, each as a part wants it: norms frozen or training, channels last, on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mural.data import Source
from mural.models import UNet
from one_gpu.parts import Part
from one_gpu.sources import made_image, made_mask

ORDERS: dict[int, Any] = {2: torch.channels_last, 3: torch.channels_last_3d}
SOME = {2: 256, 3: 32}
"""Extents of the image, for each number of dims, whose statistics frozen norms hold."""


@dataclass(frozen=True)
class Net:
    """A model: how it is built (at toy size, or whole, with a norm), and what it takes and gives."""

    build: Callable[[bool, str], nn.Module]
    dims: int
    channels: int
    per_position: bool = True
    """False: one label for an image."""


def unet(dims: int, channels: int, width: int, depth: int) -> Callable[[bool, str], nn.Module]:
    """A builder of U-Nets of that width and depth."""

    def build(toy: bool, norm: str) -> nn.Module:
        kind: Any = "instance" if norm == "instance" else "batch"
        return UNet(dims, channels, classes=2, width=4 if toy else width, depth=2 if toy else depth, norm=kind)

    return build


def resnet50(toy: bool, norm: str) -> nn.Module:
    """ResNet-50 of torchvision for two classes, at toy size a narrow one."""
    from harness.vision import narrowed, torchvision  # noqa: PLC0415 (an optional package)

    return narrowed("resnet50", 16, classes=2) if toy else torchvision.models.resnet50(weights=None, num_classes=2)


NETS = {
    # Ronneberger, Fischer and Brox, 2015, with norms: 31 M parameters.
    "unet": Net(unet(2, 3, 64, 4), 2, 3),
    "resnet50": Net(resnet50, 2, 3, per_position=False),
    # Width and depth of Çiçek and others, 2016.
    "unet3d": Net(unet(3, 1, 32, 3), 3, 1),
}


def built(part: Part, device: torch.device, toy: bool) -> nn.Module:
    """The model of a part on the device, from one seed, with channels last."""
    torch.manual_seed(0)
    net = NETS[part.model]
    model = net.build(toy, part.norm)
    if part.norm == "frozen":
        freeze(model, made_image(net.channels, (SOME[net.dims],) * net.dims).read()[None])
    return model.to(device).to(memory_format=ORDERS[net.dims])


def freeze(model: nn.Module, image: Tensor) -> None:
    """Let batch norms use the statistics of that image from now on; their parameters are still trained.

    With those that a new model holds, values grow from block to block, and the loss of a ResNet is 0.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(image)
    for norm in norms:
        norm.eval()


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks whose activations a user would compute again: those of a U-Net's levels, or of ResNet's layers."""
    if isinstance(model, UNet):
        yield from (model.stem, *model.down, *model.up)
    else:
        for name, child in model.named_children():
            if name.startswith("layer"):
                yield from child.children()


@dataclass(frozen=True)
class Data:
    """An image as a source, and its target: a mask as a source, or one label."""

    image: Source
    target: Source | Tensor

    @property
    def bytes_read(self) -> int:
        """What was read of both so far, as the files hold it."""
        read = self.image.counter.bytes_decoded
        return read + (0 if isinstance(self.target, Tensor) else self.target.counter.bytes_decoded)


def made_data(part: Part, size: int, device: torch.device) -> Data:
    """An image of that size for a part's model; its boxes are made as they are read."""
    net = NETS[part.model]
    extents = (size,) * net.dims
    image = made_image(net.channels, extents, "float" in part.extras)
    label = torch.ones(1, dtype=torch.long, device=device)
    return Data(image, made_mask(net.channels, extents) if net.per_position else label)
