"""Models that cannot be trained, each in another way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

number = 3


def typo() -> nn.Module:
    return nn.Conv2d(3, 2, 1, padding_mod="zeros")


def raising(width: int = 4) -> nn.Module:
    raise RuntimeError("no licence for this model")


def text() -> str:
    return "a model"


class Returning(nn.Module):
    """Returns its result in a container."""

    def __init__(self, kind: str = "dict"):
        super().__init__()
        self.conv, self.kind = nn.Conv2d(3, 2, 1), kind

    def forward(self, x: Tensor) -> object:
        y = self.conv(x)
        return {"dict": {"out": y, "aux": x}, "tuple": (y, x), "list": [y, x], "nothing": None}[self.kind]


def of_grey_images() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Conv2d(1, 2, 1))


def halving() -> nn.Module:
    return nn.Conv2d(3, 2, 1, stride=2)


def frozen() -> nn.Module:
    return nn.Conv2d(3, 2, 1).requires_grad_(False)


def empty() -> nn.Module:
    return nn.Identity()


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.conv(x))
        y += 1
        return y


class NotFinite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.conv(x) - 1000)


class WithoutRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.conv(x))


class Joining(nn.Module):
    """Joins an image and half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.head = nn.Conv2d(3, 3, 1, stride=2), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x, self.down(x)], 1))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Joining()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Misspelt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.covn(x)


class Loading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.conv.load_state_dict({})
        return self.conv(x)


class OfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.conv(x) + y


class OfVolumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)
