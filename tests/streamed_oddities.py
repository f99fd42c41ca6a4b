"""Models unlike an encoder-decoder: whole-image parts, several inputs and results, shared and frozen weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from streamed_losses import dice


def conv(a: int, b: int, **kwargs: Any) -> nn.Conv2d:
    """A convolution that keeps extents."""
    return nn.Conv2d(a, b, 3, padding=1, **kwargs)


class Attending(nn.Module):
    """Attention at low resolution inside an encoder-decoder."""

    def __init__(self, norm: bool = False, stride: int = 4):
        super().__init__()
        self.enter, self.down = conv(2, 4), nn.Conv2d(4, 4, stride, stride=stride)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.qkv, self.out, self.end = nn.Linear(4, 12), nn.Linear(4, 4), conv(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.enter(x)))
        low = self.down(x)
        n, c, h, w = low.shape
        tokens = low.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, c)).unbind(2)
        tokens = tokens + self.out(F.scaled_dot_product_attention(q, k, v))
        low = tokens.transpose(1, 2).reshape(n, c, h, w)
        return self.end(torch.cat([x, F.interpolate(low, size=x.shape[2:], mode="bilinear")], 1))


class Pyramid(nn.Module):
    """Adaptive pools of several sizes, brought back to the image's extents."""

    def __init__(self, sizes: tuple[int, ...] = (1, 2, 3), norm: bool = True):
        super().__init__()
        self.enter = nn.Sequential(conv(2, 4), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.ReLU(), nn.MaxPool2d(2))
        self.pools = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(s), nn.Conv2d(4, 2, 1), nn.ReLU()) for s in sizes)
        self.end = conv(4 + 2 * len(sizes), 3)

    def forward(self, x: Tensor) -> Tensor:
        low = self.enter(x)
        parts = [low, *(F.interpolate(pool(low), low.shape[2:], mode="bilinear") for pool in self.pools)]
        return F.interpolate(self.end(torch.cat(parts, 1)), x.shape[2:])


class Tokens(nn.Module):
    """A small vision transformer after convolutions: position embeddings, a class token, a classifier."""

    def __init__(self, tokens: int):
        super().__init__()
        self.patch = nn.Sequential(conv(2, 3), nn.ReLU(), nn.Conv2d(3, 4, 8, stride=8))
        self.first, self.places = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, tokens + 1, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.end = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.end(self.block(tokens)[:, 0])


class Flat(nn.Module):
    """A classifier that flattens what a pooling to 3 × 3 gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(conv(2, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), conv(3, 4), nn.ReLU())
        self.end = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.blocks(x))


class Shared(nn.Module):
    """One block twice, a parameter that is frozen, one that nobody uses, and a constant made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.end = conv(2, 3), nn.Sequential(conv(3, 3), nn.BatchNorm2d(3)), conv(3, 3)
        self.fixed = nn.Parameter(torch.randn(3, 1, 1), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(F.relu(self.block(self.enter(x)))) + self.fixed
        return self.end(x * self.scale + torch.arange(3, device=x.device).view(3, 1, 1))


class Supervised(nn.Module):
    """Several results, by name: of full and of half resolution, and of the whole image."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.deep = nn.Sequential(conv(2, 3), nn.BatchNorm2d(3), nn.ReLU()), conv(3, 4)
        self.aux, self.out, self.image = conv(4, 3), conv(7, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.enter(x)
        low = F.relu(self.deep(F.avg_pool2d(x, 2)))
        up = F.interpolate(low, x.shape[2:], mode="bilinear", align_corners=True)
        return {"out": self.out(torch.cat([up, x], 1)), "aux": self.aux(low), "image": self.image(low.mean((2, 3)))}


def supervise(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """A loss of several results and targets."""
    mask = target["mask"]
    low = F.interpolate(mask.unsqueeze(1).double(), output["aux"].shape[2:]).squeeze(1).long()
    return (
        F.cross_entropy(output["out"], mask) + 0.4 * F.cross_entropy(output["aux"], low)
        + 0.1 * F.cross_entropy(output["image"], target["label"]) + dice(output["out"], mask)
    )  # fmt: skip


class Recomputed(nn.Module):
    """A block under torch's own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.end = conv(2, 3), nn.Sequential(conv(3, 3), nn.GELU(), conv(3, 3)), conv(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(checkpoint(self.block, self.enter(x), use_reentrant=False))


class Gated(nn.Module):
    """Pointwise calls of every sort, chunks and splits of channels, views and slices of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.end = conv(2, 8), conv(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.enter(x).chunk(2, 1)
        y = a.tanh() * b.sigmoid() + torch.where(a > 0, a, 0.1 * b).clamp(-2, 2)
        first, second = y.split([1, 3], 1)
        y = torch.cat([second.softmax(1), first.exp() / (1 + first.exp())], 1)
        y = F.pixel_shuffle(F.pixel_unshuffle(y, 2), 2) if x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0 else y
        y = y - y.mean((2, 3), keepdim=True)
        y = y / (y.square().mean((2, 3), keepdim=True) + 1).sqrt()
        return self.end(F.pad(y, (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 1:-1])


class Halves(nn.Module):
    """An image of two inputs: one of full resolution, one of half."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.end = conv(2, 3), conv(2, 3), conv(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.end(torch.cat([self.one(x), self.two(y)], 1))


class TwoHeads(nn.Module):
    """A classifier with a global mean of the image, which tiles add up, and a part that sees it whole."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.enter, self.deep = nn.Sequential(conv(2, 3), nn.BatchNorm2d(3) if norm else nn.ReLU()), conv(3, 3)
        self.mean, self.whole, self.scale = nn.Linear(3, 3), nn.Linear(27, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        low = F.adaptive_avg_pool2d(self.deep(F.avg_pool2d(x, 4)), 3).flatten(1)
        return self.mean(x.mean((2, 3))) + self.whole(low) * self.scale.exp()


class WholeNorm(nn.Module):
    """Norms after a part that sees the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Sequential(conv(2, 4), nn.BatchNorm2d(4)), nn.Conv2d(4, 4, 4, stride=4)
        self.deep = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4), nn.ReLU())
        self.end = nn.Sequential(conv(8, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.end(torch.cat([x, F.interpolate(self.deep(self.down(x)), x.shape[2:])], 1))


class Siamese(nn.Module):
    """One norm on two inputs, of which the first takes longer to be known than the second."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Sequential(conv(2, 3), nn.BatchNorm2d(3)), conv(2, 3), nn.BatchNorm2d(3)
        self.end = conv(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.cat([self.norm(self.one(x)), self.norm(self.two(x))], 1))


class Summary(nn.Module):
    """A vector of each image, or of the whole batch, that tiles and calls on whole tensors read."""

    def __init__(self, batch: bool) -> None:
        super().__init__()
        self.enter, self.down, self.end = conv(2, 4), nn.Conv2d(4, 4, 4, stride=4), conv(8, 3)
        self.norm, self.gate, self.batch = nn.BatchNorm2d(4), nn.Linear(4, 4), batch

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        gate = self.gate(x.mean((0, 2, 3) if self.batch else (2, 3)))
        normed = self.norm(x * gate[..., None, None])
        low = self.down(x).flip(2)
        low = low * gate.flip(-1).cumsum(0)[..., None, None]
        return self.end(torch.cat([normed, F.interpolate(low, size=x.shape[2:])], 1))
