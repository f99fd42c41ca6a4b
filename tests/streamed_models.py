"""Small models and losses of every kind that streams, in 1 to 3 dims, each told by plain words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 3
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
NORMS = ("none", "frozen", "batch", "group", "instance")
ACTS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True), "gelu": nn.GELU, "silu": nn.SiLU, "prelu": nn.PReLU,
}  # fmt: skip
BLOCKS = (
    "conv", "residual", "in place", "dense", "depthwise", "grouped", "dilated", "convnext", "squeeze", "normed twice",
)  # fmt: skip
DOWNS: dict[str, tuple[str, dict[str, Any]]] = {
    "max": ("MaxPool", {"kernel_size": 2}),
    "max 3": ("MaxPool", {"kernel_size": 3, "stride": 2, "padding": 1}),
    "max ceil": ("MaxPool", {"kernel_size": 2, "ceil_mode": True}),
    "max dilated": ("MaxPool", {"kernel_size": 2, "stride": 2, "padding": 1, "dilation": 2}),
    "avg": ("AvgPool", {"kernel_size": 3, "stride": 2, "padding": 1}),
    "avg valid": ("AvgPool", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
    "avg ceil": ("AvgPool", {"kernel_size": 2, "ceil_mode": True}),
    "strided": ("Conv", {"kernel_size": 3, "stride": 2, "padding": 1}),
}
UPS = ("transposed", "transposed 3", "nearest", "linear", "aligned", "size")
HEADS = ("pixels", "classes", "pooled max")


def layer(name: str, dims: int, *args: Any, **kwargs: Any) -> nn.Module:
    """Torch's layer of that name for images of some dims."""
    return getattr(nn, f"{name}{dims}d")(*args, **kwargs)


@dataclass(frozen=True)
class Spec:
    """An encoder-decoder of one kind of block, or a classifier."""

    dims: int = 2
    width: int = 2
    depth: int = 1
    block: str = "conv"
    norm: str = "none"
    act: str = "relu"
    down: str = "max"
    up: str = "transposed"
    skip_first: bool = True
    padding: str = "zeros"
    dropout: str = ""
    head: str = "pixels"

    def build(self) -> nn.Module:
        """The model in float64, with parameters that no two tests share by chance."""
        torch.manual_seed(5)
        model = (Segmenter if self.head == "pixels" else Classifier)(self).double()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "var" in name:
                tensor.uniform_(0.5, 2.0)
            elif tensor.is_floating_point():
                with torch.no_grad():
                    tensor.add_(torch.randn_like(tensor), alpha=0.1)
        if self.norm == "frozen":
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return model

    def conv(self, a: int, b: int, size: int = 3, **kwargs: Any) -> nn.Module:
        """A convolution that keeps extents."""
        pad = kwargs.get("dilation", 1) * (size // 2)
        return layer("Conv", self.dims, a, b, size, padding=pad, padding_mode=self.padding, **kwargs)

    def normed(self, width: int) -> nn.Module:
        """The norm."""
        if self.norm in ("frozen", "batch"):
            return layer("BatchNorm", self.dims, width)
        if self.norm == "group":
            return nn.GroupNorm(2 if width % 2 == 0 else 1, width)
        if self.norm == "instance":
            return layer("InstanceNorm", self.dims, width, affine=True)
        if self.norm == "tracked":
            return layer("InstanceNorm", self.dims, width, track_running_stats=True)
        return nn.Identity()


class Squeeze(nn.Module):
    """Squeeze and excite: channels weighted by what the whole image shows."""

    def __init__(self, width: int, dims: int):
        super().__init__()
        self.pool = layer("AdaptiveAvgPool", dims, 1)
        self.first, self.second = layer("Conv", dims, width, 2, 1), layer("Conv", dims, 2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.second(F.relu(self.first(self.pool(x)))))


class Block(nn.Module):
    """One block of a spec."""

    def __init__(self, spec: Spec, a: int, b: int):
        super().__init__()
        self.spec, kind = spec, spec.block
        groups = {"depthwise": b, "grouped": 2 if b % 2 == 0 else 1}.get(kind, 1)
        self.enter = spec.conv(a, b, 1) if kind in ("depthwise", "grouped", "residual", "in place") else None
        first = b if self.enter is not None else a
        self.conv = spec.conv(first, b, groups=groups, dilation=2 if kind == "dilated" else 1)
        self.norm, self.act = spec.normed(b), ACTS[spec.act]()
        self.more = None
        if kind == "dense":
            self.more = spec.conv(a + b, b)
        elif kind == "depthwise":
            self.more = spec.conv(b, b, 1)
        elif kind == "squeeze":
            self.more = Squeeze(b, spec.dims)
        elif kind == "normed twice":
            self.more = nn.Sequential(spec.conv(b, b), spec.normed(b))
        elif kind == "convnext":
            self.more = nn.Sequential(nn.LayerNorm(b), nn.Linear(b, 2 * b), nn.GELU(), nn.Linear(2 * b, b))
            self.scale = nn.Parameter(torch.ones(b))
        self.drop = {"features": nn.Dropout(0.3), "channels": layer("Dropout", spec.dims, 0.3) if spec.dims > 1 else
                     nn.Dropout1d(0.3), "alpha": nn.AlphaDropout(0.3)}.get(spec.dropout)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        kind = self.spec.block
        entered = x if self.enter is None else self.enter(x)
        y = self.norm(self.conv(entered))
        if kind == "in place":
            y += entered
        if kind == "residual":
            y = entered + y
        y = self.act(y)
        if kind == "dense":
            y = self.more(torch.cat([x, y], 1))
        elif kind == "convnext":
            y = y + (self.scale * self.more(y.movedim(1, -1))).movedim(-1, 1)
        elif self.more is not None:
            y = self.more(y)
        return y if self.drop is None else self.drop(y)


def down(spec: Spec, width: int) -> nn.Module:
    """What halves the extents."""
    name, kwargs = DOWNS[spec.down]
    return layer(name, spec.dims, *((width, width) if name == "Conv" else ()), **kwargs)


class Up(nn.Module):
    """What brings an image to the extents of another."""

    def __init__(self, spec: Spec, a: int, b: int):
        super().__init__()
        self.kind, self.mode = spec.up, LINEAR[spec.dims]
        self.conv = None
        if spec.up == "transposed":
            self.conv = layer("ConvTranspose", spec.dims, a, b, 2, stride=2)
        elif spec.up == "transposed 3":
            self.conv = layer("ConvTranspose", spec.dims, a, b, 3, stride=2, padding=1, output_padding=1)
        else:
            self.after = spec.conv(a, b, 1)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        extents = tuple(like.shape[2:])
        if self.conv is not None:
            return fitted(self.conv(x), extents)
        if self.kind == "nearest":
            x = F.interpolate(x, scale_factor=2)
        elif self.kind in ("linear", "aligned"):
            x = F.interpolate(x, scale_factor=2, mode=self.mode, align_corners=self.kind == "aligned")
        else:
            x = F.interpolate(x, size=extents, mode=self.mode, align_corners=False)
        return fitted(self.after(x), extents)


def fitted(x: Tensor, extents: tuple[int, ...]) -> Tensor:
    """An image with rows and columns added or left out at the end."""
    more = [want - have for want, have in zip(extents, x.shape[2:], strict=True)]
    return F.pad(x, [amount for n in reversed(more) for amount in (0, n)]) if any(more) else x


class Segmenter(nn.Module):
    """An encoder-decoder with skips."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        widths = [spec.width + i for i in range(spec.depth + 1)]
        self.downs = nn.ModuleList(Block(spec, a, b) for a, b in zip([2, *widths[:-1]], widths, strict=True))
        self.pools = nn.ModuleList(down(spec, w) for w in widths[:-1])
        self.ups = nn.ModuleList(Up(spec, b, a) for a, b in pairwise(widths))
        self.ends = nn.ModuleList(Block(spec, 2 * a, a) for a in widths[:-1])
        self.head = spec.conv(widths[0], CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.downs[0](x)
        skips: list[Tensor] = []
        for pool, block in zip(self.pools, list(self.downs)[1:], strict=True):
            skips.append(x)
            x = block(pool(x))
        for up, end, skip in reversed(list(zip(self.ups, self.ends, skips, strict=True))):
            x = up(x, skip)
            x = end(torch.cat([skip, x] if self.spec.skip_first else [x, skip], 1))
        return self.head(x)


class Classifier(nn.Module):
    """Blocks, a global pooling, and layers for each image."""

    def __init__(self, spec: Spec):
        super().__init__()
        widths = [spec.width + i for i in range(spec.depth + 1)]
        parts: list[nn.Module] = [Block(spec, 2, widths[0])]
        for a, b in pairwise(widths):
            parts += [down(spec, a), Block(spec, a, b)]
        self.blocks = nn.Sequential(*parts)
        self.pool = layer("AdaptiveMaxPool" if spec.head == "pooled max" else "AdaptiveAvgPool", spec.dims, 1)
        self.last = nn.Sequential(nn.Flatten(), nn.Linear(widths[-1], 4), nn.SiLU(), nn.Linear(4, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.blocks(x)))
