"""What the numbers of a model's result mean, as its training says: classes, yes or no for each channel, or values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mural.train.config import Config
from mural.train.validate import class_type


@dataclass(frozen=True)
class Meaning:
    """How results (N, K, …) become what is written: each position by itself, so that tiles may be taken alone."""

    kind: Literal["classes", "logits", "values"]

    def labels(self, output: Tensor) -> Tensor:
        """The class of every position, 0 or 1 for each channel, or the values themselves; (N, C, …).

        >>> Meaning("classes").labels(torch.tensor([[[0.1], [0.7]]]))
        tensor([[[1]]], dtype=torch.uint8)
        """
        if self.kind == "classes":
            return output.argmax(1, keepdim=True).to(class_type(output.shape))
        return (output > 0).to(torch.uint8) if self.kind == "logits" else output.float()

    def probabilities(self, output: Tensor) -> Tensor:
        """The probability of every class at every position, (N, K, …)."""
        return torch.softmax(output.float(), 1) if self.kind == "classes" else torch.sigmoid(output.float())


def meaning_of(config: Config, channels: int) -> Meaning:
    """What the channels of a result mean.

    >>> meaning_of(Config(), 3), meaning_of(Config.of({"loss": {"name": "bce"}, "data": {"mask": "channels"}}), 1)
    (Meaning(kind='classes'), Meaning(kind='logits'))
    """
    if config.data.mask == "classes" and channels > 1:
        return Meaning("classes")
    return Meaning("logits" if config.loss.name == "bce" else "values")
