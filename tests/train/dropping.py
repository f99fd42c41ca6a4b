"""Models for tests: one that draws random numbers, and one that breaks after some steps."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn

from mural.data import Sample, real


def make() -> nn.Module:
    """Two convolutions with dropout between them."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Dropout(0.3), nn.Conv2d(6, 2, 1))


class Breaks(nn.Module):
    """Passes its input on; from some call on, one value of it is no number."""

    def __init__(self, after: int):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * torch.where(self.calls > self.after, float("nan"), 1.0)


class Breaking(nn.Module):
    """A network with such a layer."""

    def __init__(self, after: int):
        super().__init__()
        self.conv, self.breaks, self.last = nn.Conv2d(3, 4, 3, padding=1), Breaks(after), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.breaks(self.conv(x)))


def breaking(after: int) -> nn.Module:
    """The network that breaks."""
    return Breaking(after)


def classifier() -> nn.Module:
    """A small classifier of images."""
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), pooled)


def tissue() -> list[Sample]:
    """A dataset of one real image."""
    return [real("immunohistochemistry")]


class Remembers(nn.Module):
    """Passes its input on, and keeps how often it saw how large a one, and the mean of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[int, ...], int] = {}
        self.mean = torch.zeros(())

    def get_extra_state(self) -> dict[str, object]:
        return {"seen": self.seen, "mean": self.mean, "code": b"\x00\xff"}

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.seen, self.mean = state["seen"], state["mean"]  # type: ignore[assignment]
        if state["code"] != b"\x00\xff":
            raise ValueError(state["code"])

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.seen[tuple(x.shape)] = self.seen.get(tuple(x.shape), 0) + 1
            with torch.no_grad():
                self.mean = torch.as_tensor(x.mean())
        return x * 1.0


def remembering() -> nn.Module:
    """A network whose end remembers what it saw."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), Remembers())


class Failing:
    """A loss that fails in its third call: it raises, or its process is killed, on the last rank."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor, how: str) -> Tensor:
        self.calls += 1
        if self.calls == 3 and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the third call fails")
        return nn.functional.cross_entropy(output, target)


failing = Failing()


class Unsavable(nn.Conv2d):
    """A layer whose extra state only pickle could hold."""

    def get_extra_state(self) -> object:
        return Failing()

    def set_extra_state(self, state: object) -> None:
        del state


def unsavable() -> nn.Module:
    """A network with such a layer."""
    return Unsavable(3, 2, 1)
