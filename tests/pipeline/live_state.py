"""Blocks that remember: counters, annealed and rebound attributes, buffers that forward moves, chance in Python.

What they remember does not depend on the images, so micro-batches and recomputing can be exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from live_blocks import CHANNELS, Block, mixer
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class Counter(Block):
    watched = ("count",)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def change(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * (1 + 0.1 * self.count)


class Annealed(Block):
    watched = ("rate",)

    def __init__(self) -> None:
        super().__init__()
        self.rate = 1.0

    def change(self, x: Tensor) -> Tensor:
        y = x * self.rate + x.tanh() * (1 - self.rate)
        self.rate *= 0.8
        return y


class Logged(Block):
    """A list that grows, in a dict that is changed where it is."""

    watched = ("log",)

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, list[int]] = {"seen": []}

    def change(self, x: Tensor) -> Tensor:
        self.log["seen"].append(len(self.log["seen"]))
        return x * (1 + 0.1 * len(self.log["seen"]))


class Rebound(Block):
    """A tensor attribute that is no buffer, bound anew in every call."""

    watched = ("gain",)

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.ones(CHANNELS, 1, 1, dtype=torch.float64)

    def change(self, x: Tensor) -> Tensor:
        self.gain = self.gain * 1.1
        return x * self.gain.to(x.device)


class ReboundBuffer(Block):
    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(CHANNELS, 1, 1))

    def change(self, x: Tensor) -> Tensor:
        self.gain = self.gain * 1.1
        return x * self.gain


class MovedBuffer(Block):
    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(CHANNELS, 1, 1))

    def change(self, x: Tensor) -> Tensor:
        y = x * self.gain.clone()
        self.gain.mul_(1.1)
        return y


class SilentBuffer(Block):
    """A buffer that no state dict holds, of integers."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def change(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / (1 + 0.1 * self.calls)


class Average(Block):
    """A moving average of a parameter: read, then moved, with the weight as it is in this step."""

    slow: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slow", torch.zeros(CHANNELS, CHANNELS, 1, 1))

    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.lerp_(self.mix.weight, 0.5)
        return x + nn.functional.conv2d(x, self.slow.clone())


class Toggled(Block):
    """One branch in every other call: the other one's gradients are None then."""

    watched = ("first",)

    def __init__(self) -> None:
        super().__init__()
        self.first = True
        self.a, self.b = mixer(3), mixer()

    def change(self, x: Tensor) -> Tensor:
        chosen, self.first = (self.a if self.first else self.b), not self.first
        return chosen(x) + x


class Chance(Block):
    def change(self, x: Tensor) -> Tensor:
        return x * (0.5 + random.random())


class NumpyChance(Block):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mixer(3), mixer()

    def change(self, x: Tensor) -> Tensor:
        return (self.a if np.random.rand() < 0.5 else self.b)(x) + x


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.normal = spectral_norm(mixer(3))

    def change(self, x: Tensor) -> Tensor:
        return self.normal(x)


class SpectralHook(Block):
    """The older spectral norm: a forward pre-hook that moves a buffer and binds the weight anew."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.utils.spectral_norm(mixer(3))

    def change(self, x: Tensor) -> Tensor:
        return self.normal(x)


class StillNorm(Block):
    """A batch norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(CHANNELS)
        nn.init.uniform_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        self.norm.eval()

    def change(self, x: Tensor) -> Tensor:
        return self.norm(x)


class FirstShape(Block):
    """Makes itself a constant in its first call, from the extents that it sees."""

    watched = ("wave",)

    def __init__(self) -> None:
        super().__init__()
        self.wave: Tensor | None = None

    def change(self, x: Tensor) -> Tensor:
        if self.wave is None:
            self.wave = torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype, device=x.device)[:, None, None] * x.shape[2]
        return x * (self.wave / 16)


CALLS = [0]


class GlobalCounter(Block):
    def __init__(self) -> None:
        super().__init__()
        CALLS[0] = 0

    def change(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return x * (1 + 0.1 * CALLS[0])


class ClassCounter(Block):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        ClassCounter.calls = 0

    def change(self, x: Tensor) -> Tensor:
        ClassCounter.calls += 1
        return x * (1 + 0.1 * ClassCounter.calls)


class Count:
    """A number that is counted up past all modules."""

    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> int:
        self.calls += 1
        return self.calls


COUNT = Count()


def begin() -> None:
    COUNT.calls = 0


def counted(x: Tensor) -> Tensor:
    return x * (1 + 0.1 * COUNT.next())


class HelperCounter(Block):
    """A helper counts in an object that the class itself does not name."""

    def __init__(self) -> None:
        super().__init__()
        begin()

    def change(self, x: Tensor) -> Tensor:
        return counted(x)


def enclosed() -> Block:
    """A block that counts in a variable of the function around it."""
    calls = 0

    class Enclosed(Block):
        def change(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return x * (1 + 0.1 * calls)

    return Enclosed()


STATE: dict[str, Callable[[], Block]] = {
    "counter": Counter,
    "annealed": Annealed,
    "logged": Logged,
    "rebound": Rebound,
    "rebound_buffer": ReboundBuffer,
    "moved_buffer": MovedBuffer,
    "silent_buffer": SilentBuffer,
    "weight_average": Average,
    "toggled": Toggled,
    "chance": Chance,
    "numpy_chance": NumpyChance,
    "spectral": Spectral,
    "spectral_hook": SpectralHook,
    "still_norm": StillNorm,
    "first_shape": FirstShape,
    "global_counter": GlobalCounter,
    "class_counter": ClassCounter,
    "helper_counter": HelperCounter,
    "enclosed_counter": enclosed,
}
