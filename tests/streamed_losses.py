"""Losses that streamed steps take, by name, each with a target for a result of some shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = 255
WEIGHTS = (0.3, 1.0, 2.5)


def dice(output: Tensor, target: Tensor) -> Tensor:
    """One minus the mean Dice coefficient of classes, over the whole batch."""
    chance = output.softmax(1)
    truth = F.one_hot(target, output.shape[1]).movedim(-1, 1).to(output.dtype)
    dims = (0, *range(2, output.ndim))
    shared, both = (chance * truth).sum(dims), (chance + truth).sum(dims)
    return 1 - ((2 * shared + 1) / (both + 1)).mean()


def dice_per_image(output: Tensor, target: Tensor) -> Tensor:
    """One minus the mean Dice coefficient of classes and images."""
    chance = output.softmax(1)
    truth = F.one_hot(target, output.shape[1]).movedim(-1, 1).to(output.dtype)
    dims = tuple(range(2, output.ndim))
    shared, both = (chance * truth).sum(dims), (chance + truth).sum(dims)
    return 1 - ((2 * shared + 1) / (both + 1)).mean()


def flat_dice(output: Tensor, target: Tensor) -> Tensor:
    """Dice as many write it: images flattened first."""
    chance = output.softmax(1).view(*output.shape[:2], -1)
    truth = F.one_hot(target, output.shape[1]).movedim(-1, 1).reshape(chance.shape).to(output.dtype)
    shared = 2 * (chance * truth).sum(-1) + 1
    return 1 - (shared / (chance.sum(-1) + truth.sum(-1) + 1)).mean()


def both(output: Tensor, target: Tensor) -> Tensor:
    """Dice and cross entropy."""
    return dice(output, target) + 0.5 * F.cross_entropy(output, target)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy with weights of classes, and positions that do not count."""
    weight = torch.tensor(WEIGHTS, dtype=output.dtype, device=output.device)
    return F.cross_entropy(output, target, weight, ignore_index=IGNORED, label_smoothing=0.1)


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over positions that count."""
    return F.cross_entropy(output, target, ignore_index=IGNORED)


def summed(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, added up."""
    return F.cross_entropy(output, target, reduction="sum")


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    """A mean of squares without torch's loss functions."""
    return (output - target).square().mean() + output.abs().mean() ** 2


def root(output: Tensor, target: Tensor) -> Tensor:
    """A root of a mean: the total's gradient is not one over the number of positions."""
    return F.mse_loss(output, target).sqrt()


def per_image(output: Tensor, target: Tensor) -> Tensor:
    """A mean of what each image gives as one number."""
    return F.mse_loss(output, target, reduction="none").flatten(1).mean(1).sqrt().mean()


class Uncertain(nn.Module):
    """Two terms weighted by parameters of its own (Kendall and others, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        terms = torch.stack([F.cross_entropy(output, target), dice(output, target)])
        return (terms * torch.exp(-self.logs) + self.logs).sum()


class Scaled(nn.Module):
    """Logits divided by a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.7, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output / self.temperature, target)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": F.cross_entropy, "weighted": weighted, "ignoring": ignoring, "summed": summed,
    "bce": F.binary_cross_entropy_with_logits, "mse": F.mse_loss, "l1": F.l1_loss, "smooth l1": F.smooth_l1_loss,
    "dice": dice, "dice per image": dice_per_image, "flat": flat_dice,
    "dice and cross entropy": both, "by hand": by_hand, "root": root,
    "per image": per_image,
    "uncertain": Uncertain(), "scaled": Scaled(),
}  # fmt: skip
REAL = ("bce", "mse", "l1", "smooth l1", "by hand", "root", "per image")
PIXELS = ("dice", "flat", "dice per image", "dice and cross entropy", "uncertain")
"""Those that need the image's dims."""


def target_for(name: str, shape: tuple[int, ...], ignored: str = "", seed: int = 7) -> Tensor:
    """A target for a result of that shape; of `ignored` there is "a tile", "an image" or "some"."""
    generator = torch.Generator().manual_seed(seed)
    if name in REAL:
        real = torch.rand(shape, generator=generator, dtype=torch.float64)
        return real.round() if name == "bce" else real
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    if name in ("weighted", "ignoring"):
        if ignored == "some":
            target[torch.rand(target.shape, generator=generator) < 0.3] = IGNORED
        elif ignored == "a tile" and target.ndim > 1:
            target[..., : target.shape[-1] // 2] = IGNORED
        elif ignored == "an image" and target.shape[0] > 1:
            target[0] = IGNORED
    return target
