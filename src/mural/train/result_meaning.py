"""What the numbers of a model's result mean, as its training says: for scores, predictions and reports alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.engine.loss_variables import held_by
from mural.shard import dice_loss
from mural.train.config import Config
from mural.train.configured_loss import LOSSES, inner_loss, make_loss, one_hot
from mural.train.result_forms import Kind

KINDS: dict[Kind, tuple[Any, ...]] = {
    "classes": (F.cross_entropy, F.nll_loss, dice_loss, nn.CrossEntropyLoss, nn.NLLLoss),
    "logits": (
        F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss,
        F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss, F.soft_margin_loss, nn.SoftMarginLoss,
    ),
    "probabilities": (F.binary_cross_entropy, nn.BCELoss),
    "values": (
        F.mse_loss, nn.MSELoss, F.l1_loss, nn.L1Loss, F.smooth_l1_loss, nn.SmoothL1Loss, F.huber_loss, nn.HuberLoss,
    ),
}  # fmt: skip
"""What results mean to the losses of torch and of mural."""


@dataclass(frozen=True)
class Meaning:
    """How results (N, K, …) become what is scored, written and shown: each position by itself, so also a tile's."""

    kind: Kind

    @property
    def binary(self) -> bool:
        """Whether each channel says yes or no."""
        return self.kind in ("logits", "probabilities")

    def labels(self, output: Tensor) -> Tensor:
        """The class of every position, 0 or 1 for each channel, or the values themselves; (N, C, …).

        >>> Meaning("classes").labels(torch.tensor([[[0.1], [0.7]]]))
        tensor([[[1]]], dtype=torch.uint8)
        """
        if self.kind == "classes":
            return output.argmax(1, keepdim=True).to(class_type(output.shape))
        if self.binary:
            return (output > (0.5 if self.kind == "probabilities" else 0)).to(torch.uint8)
        return output.float()

    def probabilities(self, output: Tensor) -> Tensor:
        """The probability of every class, or of a yes in every channel, at every position, (N, K, …)."""
        if self.kind == "probabilities":
            return output.float()
        return torch.softmax(output.float(), 1) if self.kind == "classes" else torch.sigmoid(output.float())


def class_type(shape: Sequence[int]) -> torch.dtype:
    """The type in which the classes of a result (N, K, …) are written."""
    return torch.uint8 if shape[1] <= 256 else torch.uint16


def meaning_of(config: Config, channels: int) -> Meaning:
    """What the channels of a result mean: what the loss takes them for, and where that is not known, the masks.

    >>> meaning_of(Config(), 3), meaning_of(Config.of({"loss": {"name": "bce"}, "data": {"mask": "channels"}}), 1)
    (Meaning(kind='classes'), Meaning(kind='logits'))
    """
    with torch.random.fork_rng(devices=[]):  # a loss may draw its first weights
        loss = LOSSES.get(config.loss.name) or make_loss(config.loss, torch.device("cpu"), torch.float32)
    kind = kind_of(loss)
    if kind == "unknown" and config.data.mask == "classes" and channels > 1:
        kind = "classes"
    return Meaning(probed(loss, channels) if kind == "unknown" and config.data.mask != "classes" else kind)


def kind_of(loss: Callable[..., Any]) -> Kind:
    """What results mean to a loss of torch, of mural, or of MONAI.

    >>> kind_of(nn.BCEWithLogitsLoss())
    'logits'
    """
    inner = inner_loss(loss)
    for kind, known in KINDS.items():
        if any(isinstance(inner, one) if isinstance(one, type) else inner is one for one in known):
            return kind
    if one_hot(inner):
        return "classes"
    parts = list(inner.modules()) if isinstance(inner, nn.Module) else []
    if any(getattr(part, "softmax", None) is True or getattr(part, "use_softmax", None) is True for part in parts):
        return "classes"
    focal = any(getattr(part, "use_softmax", None) is False for part in parts)
    return "logits" if focal or any(getattr(part, "sigmoid", None) is True for part in parts) else "unknown"


def probed(loss: Callable[..., Any], channels: int) -> Kind:
    """What results mean to a function of the user's own, by how it rates some: nobody knows where it fails or learns.

    Where more is always better, results are logits; where the target is best and more is worse, they are values.

    >>> probed(lambda o, t: F.binary_cross_entropy_with_logits(o, t) + 1 - (o.sigmoid() * t).mean(), 2)
    'logits'
    """
    if held_by(loss):
        return "unknown"

    def rated(output: float, target: float) -> float:
        return float(loss(*(torch.full((1, channels, 4, 4), value) for value in (output, target))))

    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yes, no = ([rated(output, target) for output in (-20.0, 0.0, 1.0, 20.0)] for target in (1.0, 0.0))
    except Exception:  # whatever a function of the user's own may raise for such tensors
        return "unknown"
    if yes[3] < yes[2] < yes[1] < yes[0] and no[0] < no[1] < no[2] < no[3]:
        return "logits"
    return "values" if yes[2] < min(yes[0], yes[1], yes[3]) and no[1] < min(no[0], no[2], no[3]) else "unknown"
