"""Small models for the law of stages: real architectures, and one model for each odd thing that a forward may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness.vision import narrowed
from torch import Tensor, nn
from torch.nn import functional as F

from mural.models import UNet, amoebanetd, resnet_v2
from zoo import dense


def conv(inputs: int, outputs: int, kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


class Tied(nn.Module):
    """Two convolutions that share their weight, a third whose weight is another one's transposed, a module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = conv(3, 4)
        self.first, self.second = conv(4, 4), conv(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm2d(4)
        self.twice = conv(4, 4, 1)
        self.scale = nn.Parameter(torch.tensor([1.2]))
        self.head = conv(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(self.inward(x))).relu() * self.scale
        y = self.twice(y)
        y = F.conv2d(y, self.first.weight.transpose(0, 1), padding=1).tanh()
        y = self.twice(self.second(y)) * self.scale
        return self.head(y)


class Fan(nn.Module):
    """A value with several consumers far apart, and the image itself used late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = conv(3, 4), conv(4, 4), conv(4, 4), conv(12, 4)
        self.norm = nn.GroupNorm(2, 4)
        self.head = conv(7, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        a = self.a(image).tanh()
        b = self.b(a) + a
        c = self.norm(self.c(b) * a).relu()
        d = self.d(torch.cat([a, b, c], 1))
        return self.head(torch.cat([d + a, image], 1))


class Several(nn.Module):
    """Two inputs; results of several stages as a dict with a tuple in it, an integer one, and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 4), conv(4, 4), conv(4, 4)
        self.early, self.middle, self.head = conv(4, 3, 1), conv(4, 3, 1), conv(5, 3, 1)

    def forward(self, image: Tensor, mask: Tensor) -> dict[str, Any]:
        a = self.a(image).relu()
        best = a.argmax(1, keepdim=True)
        weak = a.detach().mean(1, keepdim=True)
        b = self.b(a).relu()
        c = self.c(b * (best > 1)).tanh() + weak
        out = self.head(torch.cat([c, mask[:, None].to(c.dtype)], 1))
        return {"out": out, "deep": (self.early(a), self.middle(b)), "best": best, "weak": weak}


def several_loss(result: dict[str, Any], target: Tensor) -> Tensor:
    deep = sum(F.cross_entropy(part, target) for part in result["deep"])
    return F.cross_entropy(result["out"], target) + 0.3 * deep + 0.1 * result["weak"].mean()


class InPlace(nn.Module):
    """Calls in place before, at and across cuts, on tensors and on views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 4), conv(4, 4), conv(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm2d(4)
        self.head = conv(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x))
        self.act(y)
        z = self.b(y)
        z += y
        z[:, :2] = z[:, 2:] * 0.5
        first = z[:, :1]
        first.mul_(2.0)
        w = self.c(z)
        w.relu_()
        w = self.act(w + z)
        return self.head(w)


class Views(nn.Module):
    """Views that cross cuts: slices, transposed and reshaped tensors, splits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(4, 4)
        self.line = nn.Linear(4, 4)
        self.head = conv(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        one, two = y.chunk(2, 1)
        turned = two.permute(0, 2, 3, 1)
        b = self.b(one).tanh()
        mixed = self.line(turned).permute(0, 3, 1, 2)
        return self.head(b * mixed + y[:, 2:6])


class Unused(nn.Module):
    """Parameters that no call reads, frozen ones, constants, buffers that are only read, and one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 4), conv(4, 4), conv(4, 4)
        self.idle = nn.Linear(3, 3)
        self.spare = nn.Parameter(torch.ones(2))
        self.b.weight.requires_grad_(False)
        self.register_buffer("shift", torch.tensor([0.1, -0.1, 0.2, 0.0]).view(4, 1, 1))
        self.register_buffer("seen", torch.zeros(4))
        self.factor = torch.tensor(1.5, dtype=torch.float64)
        self.head = conv(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu() + self.shift
        if self.training:
            self.seen += 1.0
        y = self.b(y * self.factor).tanh()
        y = self.c(y) * self.shift.exp()
        return self.head(y)


class Stopped(nn.Module):
    """A part under `no_grad`, a detached value, and a plain tensor made of parameters that a late stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.teacher = conv(3, 4), conv(4, 4), conv(3, 4)
        self.table = nn.Parameter(torch.randn(4, 2))
        self.mix = nn.Linear(2, 1)
        self.head = conv(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        gains = self.mix(self.table).sigmoid()
        with torch.no_grad():
            seen = self.teacher(x)
            seen = seen * gains.view(4, 1, 1) + 1.0
        y = self.a(x).relu() + seen
        y = self.b(y) * gains.view(4, 1, 1)
        return self.head(y + y.detach().mean((2, 3), keepdim=True))


class Random(nn.Module):
    """Random layers of every kind: dropout of values and channels, drop-path, noise on plain tensors."""

    def __init__(self, plain: bool = False) -> None:
        from harness.vision import timm

        super().__init__()
        self.a, self.b, self.c = conv(3, 4), conv(4, 4), conv(4, 4)
        self.drop, self.channels = nn.Dropout(0.4), nn.Dropout2d(0.4)
        self.path = timm.layers.DropPath(0.5)
        self.plain = plain
        self.head = conv(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.a(x).relu())
        y = y + self.path(self.b(y))
        y = y + 0.1 * torch.randn_like(y)
        if self.plain:  # as torchvision's StochasticDepth
            keep = torch.empty([y.shape[0], 1, 1, 1], dtype=y.dtype, device=y.device).bernoulli_(0.5)
            y = y * keep + torch.rand(1).to(y) * torch.rand(len(y), 4, 1, 1, dtype=y.dtype)
        y = self.channels(self.c(y).tanh())
        return self.head(y + 0.5 * F.dropout(y, 0.3, self.training))


class Look(nn.Module):
    """Looks at what it is given, and gives nothing back."""

    def forward(self, x: Tensor) -> None:
        self.shape = x.shape


class Counted(nn.Module):
    """Modules that call nothing: one that hands its argument on, one that only looks; or one number as the result."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = conv(3, 4), conv(4, 4), conv(4, 4), conv(4, 3, 1)
        self.pass_on, self.look, self.norm = nn.Identity(), Look(), nn.BatchNorm2d(4)
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        self.look(y)
        z = self.pass_on(self.b(y)) + y
        out = self.head(self.pass_on(self.norm(self.c(z))))
        return out.mean() if self.mean else out


class OneNorm(nn.Module):
    """A norm that is called twice, far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = conv(3, 4), conv(4, 4), conv(4, 3, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.b(self.norm(self.a(x)).relu())))


@dataclass
class Report:
    """A result that pytrees do not know."""

    value: Tensor


class Held(nn.Module):
    """A model that returns such a result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Report:
        return Report(self.conv(x))


class StochasticDepth(nn.Module):
    """Leaves images out as torchvision's does: by a plain tensor, one number for each image."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device).bernoulli_(0.5)
        return x * noise.div_(0.5) if self.training else x


class Stochastic(nn.Module):
    """Residual blocks that are left out for some images."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.head = conv(3, 4), conv(4, 3, 1)
        self.blocks = nn.ModuleList(nn.Sequential(conv(4, 4), nn.ReLU(), StochasticDepth()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inward(x)
        for block in self.blocks:
            y = y + block(y)
        return self.head(y)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": lambda: UNet(2, 3, 3, width=4, depth=2),
    "unet-wide": lambda: UNet(2, 3, 3, width=8, depth=3),
    "unet-instance": lambda: UNet(2, 3, 3, width=4, depth=2, norm="instance", upsample="interpolate"),
    "unet-residual": lambda: UNet(2, 3, 3, width=4, depth=2, norm="group", block="residual"),
    "unet3d": lambda: UNet(3, 3, 3, width=2, depth=1, norm="group"),
    "resnet": lambda: narrowed("resnet18", 16, classes=5),
    "bottleneck": lambda: narrowed("resnet50", 16, classes=5),
    "resnet-v2": lambda: resnet_v2(20, classes=3, width=4),
    "densenet": lambda: dense(4, 2, (2, 3), classes=3),
    "amoebanet": lambda: amoebanetd(layers=3, filters=8, classes=3),
    "tied": Tied,
    "fan": Fan,
    "several": Several,
    "in-place": InPlace,
    "views": Views,
    "unused": Unused,
    "stopped": Stopped,
    "counted": Counted,
    "one-norm": OneNorm,
    "stochastic": Stochastic,
    "random": Random,
    "random-plain": lambda: Random(plain=True),
}


def made(name: str) -> nn.Module:
    """A model with the same weights in each test, in float64."""
    torch.manual_seed(3)
    return MODELS[name]().double()
