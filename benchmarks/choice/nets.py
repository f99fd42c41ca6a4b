"""The models, as a part wants them, and the images and targets of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness.vision import narrowed, torchvision
from one_gpu.sources import made_image, made_mask
from torch import Tensor, nn

from choice.parts import BATCHES, Part
from mural.data import Source
from mural.models import UNet

CHANNELS, CLASSES = 3, 2


def built(part: Part, toy: bool) -> nn.Module:
    """The model of a part with weights from one seed, in training mode; channels last where it is convolutional."""
    torch.manual_seed(0)
    match part.model:
        case "unet":
            model: nn.Module = UNet(2, CHANNELS, CLASSES, width=8 if toy else 64, depth=2 if toy else 4)
        case "resnet50":
            whole = torchvision.models.resnet50
            # Still narrower, with channels last in bf16, torch 2.13 ends on a CPU with a corrupted heap.
            model = narrowed("resnet18", 4, classes=CLASSES) if toy else whole(num_classes=CLASSES)
        case _:
            return without_drops(small_swin() if toy else torchvision.models.swin_t(num_classes=CLASSES))
    order: dict[str, Any] = {"memory_format": torch.channels_last}
    return model.to(**order)


def small_swin() -> nn.Module:
    """A Swin transformer at toy size."""
    shape: dict[str, Any] = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
    return torchvision.models.SwinTransformer([4, 4], window_size=[7, 7], num_classes=CLASSES, **shape)


def without_drops(model: nn.Module) -> nn.Module:
    """The model with all its branches in every step, so that all steps are the same."""
    for module in model.modules():
        if isinstance(module, torchvision.ops.StochasticDepth):
            setattr(module, "p", 0.0)  # noqa: B010 (torch types every attribute as a tensor or a module)
    return model


def target_of(part: Part) -> tuple[int, ...]:
    """The shape of one image's target: a class for each pixel, or one for the image."""
    return (part.size, part.size) if part.model == "unet" else ()


@dataclass(frozen=True)
class Data:
    """The image of a step, several times, and its targets: a mask as a source, or a label for each."""

    image: Source
    target: Source | Tensor
    batch: int
    channels_last: bool

    @staticmethod
    def of(part: Part, device: torch.device) -> Data:
        """The same for all mixes."""
        extents, batch = (part.size, part.size), BATCHES[part.model]
        labels = torch.arange(batch, device=device) % CLASSES
        target = made_mask(CHANNELS, extents) if part.model == "unet" else labels
        return Data(made_image(CHANNELS, extents), target, batch, part.model != "swin_t")

    def whole(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images and targets as tensors on the device."""
        order = torch.channels_last if self.channels_last else torch.contiguous_format
        one = self.image.read().to(device)
        images = one.expand(self.batch, *one.shape).contiguous(memory_format=order)
        target = self.target
        return images, target if isinstance(target, Tensor) else target.read().long().to(device)

    def sources(self) -> tuple[Sequence[Source], Sequence[Source] | Tensor]:
        """Images and targets that are read tile by tile."""
        return [self.image] * self.batch, self.target if isinstance(self.target, Tensor) else [self.target]
