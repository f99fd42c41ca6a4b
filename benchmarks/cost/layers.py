"""Single layers as plain data, so that a file of measurements says what was measured and a layer can be built again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
Options = Mapping[str, Any]
CONVS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, type[nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE: dict[int, type[nn.Module]] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
POINTWISE: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu, "elu": F.elu, "hardswish": F.hardswish, "exp": torch.exp, "mul": lambda x: x * 1.5,
}  # fmt: skip
LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse_loss": F.mse_loss, "l1_loss": F.l1_loss, "smooth_l1_loss": F.smooth_l1_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}  # fmt: skip


class Layer(nn.Module):
    """A function of tensors as a module, so that all layers are built and run alike."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


@dataclass(frozen=True)
class Case:
    """A layer, the shapes of its inputs, their type, and whether the first of them needs a gradient."""

    layer: str
    shapes: tuple[Shape, ...]
    options: Options = field(default_factory=dict[str, Any])
    dtype: str = "float32"
    gradient: bool = True

    def module(self) -> nn.Module:
        """The layer itself, on the device that is the default now."""
        built = LAYERS[self.layer](**self.options)
        return built.to(getattr(torch, self.dtype))

    def encode(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "layer": self.layer,
            "shapes": [list(shape) for shape in self.shapes],
            "options": dict(self.options),
            "dtype": self.dtype,
            "gradient": self.gradient,
        }

    @staticmethod
    def decode(data: Mapping[str, Any]) -> Case:
        """The case that was encoded."""
        shapes = tuple(tuple(shape) for shape in data["shapes"])
        return Case(data["layer"], shapes, data["options"], data["dtype"], data["gradient"])


def conv(dims: int, inputs: int, outputs: int, **options: Any) -> nn.Module:
    """A convolution in 1, 2 or 3 dims."""
    return CONVS[dims](inputs, outputs, **options)


def transposed(dims: int, inputs: int, outputs: int, **options: Any) -> nn.Module:
    """A transposed convolution in 1, 2 or 3 dims."""
    return TRANSPOSED[dims](inputs, outputs, **options)


def pool(kind: str, dims: int, **options: Any) -> nn.Module:
    """A pool of maxima or means in 1, 2 or 3 dims."""
    function: Callable[..., Tensor] = getattr(F, f"{kind}_pool{dims}d")
    return Layer(lambda x: function(x, **options))


def resized(dims: int, scale: float, mode: str) -> nn.Module:
    """Interpolation to a multiple of the extents."""
    smooth: dict[str, Any] = {"mode": MODES[dims], "align_corners": False} if mode == "linear" else {"mode": mode}
    return Layer(lambda x: F.interpolate(x, scale_factor=scale, **smooth))


def entropy() -> nn.Module:
    """Cross-entropy of the scores of classes; the target is made on the way."""

    def loss(scores: Tensor) -> Tensor:
        target = torch.zeros((scores.shape[0], *scores.shape[2:]), dtype=torch.int64, device=scores.device)
        return F.cross_entropy(scores, target)

    return Layer(loss)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "conv": conv,
    "transposed": transposed,
    "linear": lambda inputs, outputs, bias: nn.Linear(inputs, outputs, bias=bias),
    "matmul": lambda: Layer(torch.matmul),
    "attention": lambda: Layer(F.scaled_dot_product_attention),
    "batch": lambda dims, channels: BATCH[dims](channels),
    "instance": lambda dims, channels: INSTANCE[dims](channels, affine=True),
    "group": lambda groups, channels: nn.GroupNorm(groups, channels),
    "layer": lambda width: nn.LayerNorm(width),
    "pool": pool,
    "adaptive": lambda dims, size: Layer(lambda x: getattr(F, f"adaptive_avg_pool{dims}d")(x, size)),
    "mean": lambda dims: Layer(lambda x: x.mean(tuple(range(2, 2 + dims)), keepdim=True)),
    "pointwise": lambda name: Layer(POINTWISE[name]),
    "add": lambda: Layer(torch.add),
    "multiply": lambda: Layer(torch.mul),
    "cat": lambda dim: Layer(lambda *xs: torch.cat(xs, dim)),
    "resized": resized,
    "softmax": lambda dim: Layer(lambda x: F.softmax(x, dim)),
    "log_softmax": lambda dim: Layer(lambda x: F.log_softmax(x, dim)),
    "entropy": entropy,
    "loss": lambda name: Layer(LOSSES[name]),
    "dropout": lambda rate: Layer(lambda x: F.dropout(x, rate)),
    "pad": lambda by, mode: Layer(lambda x: F.pad(x, by, mode)),
    "copy": lambda order: Layer(lambda x: x.permute(order).contiguous()),
    "roll": lambda: Layer(lambda x: torch.roll(x, (3, 3), (1, 2))),
}
