"""Losses: means, sums and ratios, penalties that no output tells, modules with parameters and state of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from live_hooks import Bent
from live_models import CLASSES, OUTPUTS, Live
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Any, Any], Tensor]


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """A ratio over the whole batch."""
    chance = logits.softmax(1)[:, 1]
    hit = (target == 1).to(logits.dtype)
    return 1 - (2 * (chance * hit).sum() + 1) / (chance.sum() + hit.sum() + 1)


def hardest(logits: Tensor, target: Tensor) -> Tensor:
    """The mean of the worst image's loss."""
    each = F.cross_entropy(logits, target, reduction="none")
    return each.flatten(1).mean(1).max() if each.ndim > 1 else each.max()


def weighted(logits: Tensor, target: Tensor) -> Tensor:
    """A mean whose divisor depends on the labels."""
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=logits.dtype, device=logits.device)
    return F.cross_entropy(logits, target, weights)


CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": F.cross_entropy,
    "mse": F.mse_loss,
    "sum": lambda logits, target: 1e-3 * F.cross_entropy(logits, target, reduction="sum"),
    "ignore": lambda logits, target: F.cross_entropy(logits, target, ignore_index=0),
    "weighted": weighted,
    "dice": dice,
    "hardest": hardest,
}


class Temperature(nn.Module):
    """A learned temperature, for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((CLASSES,), 0.2))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        scale = self.log.exp().view(1, -1, *[1] * (logits.ndim - 2))
        return F.cross_entropy(logits / scale, target)


class Uncertainty(nn.Module):
    """Two terms that learned weights balance."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(-0.1))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        terms = (F.cross_entropy(logits, target), logits.square().mean())
        return terms[0] * (-self.a).exp() + self.a + terms[1] * (-self.b).exp() + self.b


class Judge(nn.Module):
    """A small trained network that looks at the logits, next to one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = nn.Conv2d(CLASSES, CLASSES, 3, padding=1)
        self.still = nn.Conv2d(CLASSES, CLASSES, 1).requires_grad_(False)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.eye(logits), target) + 0.1 * self.still(logits).square().mean()


class Warm(nn.Module):
    """A term whose weight grows by a counter in Python, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, target) + 0.1 * self.calls * logits.square().mean()


class Relative(nn.Module):
    """The loss over its own moving average, which is a buffer."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, target)
        self.level.lerp_(loss.detach(), 0.5)
        return loss / self.level.clone()


class Custom(nn.Module):
    """A custom function with a parameter in it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(Bent.apply(logits * self.gain), target)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "temperature": Temperature,
    "uncertainty": Uncertainty,
    "judge": Judge,
    "custom": Custom,
    "warm": Warm,
    "relative": Relative,
}

PENALTIES: dict[str, Callable[[Live], Tensor]] = {
    "head": lambda model: model.head.weight.square().sum(),
    "first": lambda model: model.inward.weight.square().sum(),
    "all": lambda model: torch.stack([p.square().sum() for p in model.parameters()]).sum(),
    "kept": lambda model: model.early.square().mean(),
}
"""Terms that do not pass through the output: of weights, or of an activation that the model keeps."""

LOSSES = (*CRITERIA, *MODULES, *(f"penalty_{name}" for name in PENALTIES))


def read_by(output: str, criterion: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A criterion of logits as one of a whole result, with the result's own further term."""
    kind = OUTPUTS[output]
    if kind.labels == "batch":
        return lambda result, target: kind.logits(result).square().mean()
    if output == "tensor":
        return criterion
    return lambda result, target: criterion(kind.logits(result), target) + kind.term(result)


class Reading(nn.Module):
    """A module of logits as one of a whole result."""

    def __init__(self, inner: nn.Module, output: str) -> None:
        super().__init__()
        self.inner, self.output = inner, output

    def forward(self, result: Any, target: Any) -> Tensor:
        kind = OUTPUTS[self.output]
        return self.inner(kind.logits(result), target) + kind.term(result)


def loss_of(name: str, model: Live, seed: int) -> Loss:
    """The loss of a name for a model and its kind of result; penalties look at the model itself."""
    torch.manual_seed(seed + 1)
    if name in MODULES:
        inner = MODULES[name]().double()
        return inner if model.output == "tensor" else Reading(inner, model.output)
    if name in CRITERIA:
        return read_by(model.output, CRITERIA[name])
    plain, term = read_by(model.output, F.cross_entropy), PENALTIES[name.removeprefix("penalty_")]
    return lambda result, target: plain(result, target) + 0.02 * term(model)


def fits(loss: str, output: str) -> bool:
    """Whether a loss can look at that kind of result."""
    labels = OUTPUTS[output].labels
    if labels == "batch":
        return loss == "ce" or loss.startswith("penalty")
    # Where all labels of a batch are ignored, the mean is no number.
    return labels == "mask" or loss not in ("judge", "dice", "ignore")
