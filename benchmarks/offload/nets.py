"""The document's four models, for two classes, and the loss of their scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from harness.vision import narrowed, torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from offload.published import PARAMETERS

OPTIONS: Mapping[str, dict[str, Any]] = {"inception_v3": {"aux_logits": True, "init_weights": False}}
AUXILIARY = 0.4
"""The weight of Inception's second loss in training."""
TOY_SIDES = {"vgg19": 32, "alexnet": 64, "resnet50": 32}
"""Inception's second loss needs its whole image."""
THINNER = 16


def side_of(name: str, toy: bool) -> int:
    """The extent of a model's images."""
    whole = 299 if name == "inception_v3" else 224
    return TOY_SIDES.get(name, whole) if toy else whole


def built(name: str, device: torch.device, toy: bool) -> nn.Module:
    """The model with fresh weights from one seed, on the device; at toy size a narrow one."""
    torch.manual_seed(0)
    if toy:
        return narrowed(name, THINNER, classes=2, **OPTIONS.get(name, {})).to(device)
    with device:
        model: nn.Module = getattr(torchvision.models, name)(num_classes=2, **OPTIONS.get(name, {}))
    check_parameters(name, model)
    return model


def check_parameters(name: str, model: nn.Module) -> None:
    """Raise if a model has other parameters than the document's."""
    count = sum(p.numel() for p in model.parameters())
    if count != PARAMETERS[name]:
        raise ValueError(
            f"{name} has {count:,} parameters where the document has {PARAMETERS[name]:,}: this torchvision builds "
            f"another model, take one that gives the same"
        )


def loss_of(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Cross entropy; of both scores where a model in training gives two."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output, labels)
    scores, auxiliary = output
    return F.cross_entropy(scores, labels) + AUXILIARY * F.cross_entropy(auxiliary, labels)
