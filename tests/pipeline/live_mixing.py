"""Blocks in which the images of a batch meet: exact on the whole batch, refused in micro-batches or made whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from live_blocks import CHANNELS, Block, mixer
from live_hooks import WeightClip
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def attended(x: Tensor) -> Tensor:
    """Each image plus what it likes of the others."""
    flat = x.flatten(1)
    return x + 0.2 * ((flat @ flat.T / flat.shape[1]).softmax(-1) @ flat).reshape(x.shape)


def branched(x: Tensor) -> Tensor:
    return x.tanh() if float(x.detach().sum()) > 0 else x * 0.5


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_mean": lambda x: x - 0.5 * x.mean(0, keepdim=True),
    "batch_std": lambda x: x / (1 + x.std((0, 2, 3), keepdim=True)),
    "roll": lambda x: x + 0.3 * x.roll(1, 0),
    "flip": lambda x: x + 0.3 * x.flip(0),
    "maximum": lambda x: x / (1 + x.abs().max()),
    "norm": lambda x: x / (1 + 0.1 * x.norm()),
    "factor": lambda x: x * (x.shape[0] / 4),
    "length": lambda x: x * (len(x) / 4),
    "softmax": lambda x: x + x.softmax(0),
    "cumulated": lambda x: x + 0.1 * x.cumsum(0),
    "first_image": lambda x: x + 0.2 * x[:1],
    "reversed": lambda x: x + 0.2 * x[torch.arange(x.shape[0] - 1, -1, -1, device=x.device)],
    "unbound": lambda x: torch.stack([part * (1 + 0.1 * i) for i, part in enumerate(x.unbind(0))]),
    "attended": attended,
    "branched": branched,
    "item": lambda x: x / (1 + x.detach().abs().max().item()),
}


class Mixing(Block):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def change(self, x: Tensor) -> Tensor:
        return RULES[self.name](x)


class NormHook(Block):
    """A tensor hook that divides the gradient by its norm over the batch."""

    def change(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: 0.1 * grad / (1e-3 + grad.norm()))
        return x.tanh()


class RunningInstance(Block):
    """An instance norm with running statistics, which are means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True)

    def change(self, x: Tensor) -> Tensor:
        return self.norm(x)


class MovingMean(Block):
    """A moving average of the activations, by hand: moved, then read."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, CHANNELS, 1, 1))

    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.7).add_(0.3 * x.mean((0, 2, 3), keepdim=True))
        return x - self.mean.clone()


class BoundMean(MovingMean):
    """The same with a buffer that is bound anew."""

    def change(self, x: Tensor) -> Tensor:
        self.mean = 0.7 * self.mean + 0.3 * x.detach().mean((0, 2, 3), keepdim=True)
        return x - self.mean


class Remembered(Block):
    """An attribute that is the last batch's mean."""

    watched = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0

    def change(self, x: Tensor) -> Tensor:
        y = x + self.last
        self.last = float(x.detach().mean())
        return y


class FirstBatch(Block):
    """A scale that the first batch sets."""

    scale: Tensor
    ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, CHANNELS, 1, 1))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def change(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (0.1 + x.square().mean((0, 2, 3), keepdim=True).sqrt()))
                self.ready.fill_(True)
        return (x * self.scale).tanh()


class BatchNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(CHANNELS)

    def change(self, x: Tensor) -> Tensor:
        return self.norm(x)


class CheckpointedNorm(Block):
    """A batch norm that is recomputed: torch moves its buffers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(mixer(3), nn.BatchNorm2d(CHANNELS), nn.Tanh())

    def change(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


MIXING: dict[str, Callable[[], Block]] = {
    **{name: partial(Mixing, name) for name in RULES},
    "norm_hook": NormHook,
    "weight_clip": WeightClip,
    "instance_stats": RunningInstance,
    "moving_mean": MovingMean,
    "bound_mean": BoundMean,
    "remembered": Remembered,
    "first_batch": FirstBatch,
    "batch_norm": BatchNorm,
    "checkpoint_norm": CheckpointedNorm,
}
