"""Layers that compute: convolutions, pools, norms, activations, attention, interpolation, pads."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hunt.recipe import Layer

Kind = Callable[[Random], Layer]


def keywords(**given: object) -> str:
    """Arguments as text, without those that are None."""
    return "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)


def conv(d: Random) -> Layer:
    """A convolution with any arguments; it may change the extents."""
    kernel = d.choice([1, 2, 3, 3, 3, 5, (1, 3), (3, 1)])
    stride, padding = d.choice([1, 1, 1, 2, (1, 2)]), d.choice([0, 1, 1, 2])
    if stride == 1 and d.random() < 0.2:
        padding = "same"
    text = keywords(
        stride=stride, padding=padding, dilation=d.choice([None, None, None, 2]), groups=d.choice([None, None, 2, 4]),
        padding_mode=d.choice([None, None, None, "reflect", "replicate", "circular"]),
        bias=d.choice([None, None, False]),
    )  # fmt: skip
    return Layer("conv", (f"self.conv# = nn.Conv2d(4, 4, {kernel!r}{text})",), ("x = self.conv#(x)",))


def same_conv(d: Random) -> Layer:
    """A convolution that keeps the extents."""
    return Layer("conv3", ("self.conv# = nn.Conv2d(4, 4, 3, padding=1)",), ("x = self.conv#(x)",))


def transposed(d: Random) -> Layer:
    kernel, stride = d.choice([2, 3, 4]), d.choice([1, 2, 2])
    text = keywords(
        stride=stride, padding=d.choice([None, 1]), output_padding=1 if stride == 2 and d.random() < 0.4 else None,
        dilation=d.choice([None, None, 2]), groups=d.choice([None, 2]), bias=d.choice([None, False]),
    )  # fmt: skip
    return Layer("transposed", (f"self.up# = nn.ConvTranspose2d(4, 4, {kernel}{text})",), ("x = self.up#(x)",))


def functional_conv(d: Random) -> Layer:
    """Weights of its own making, by the functional form."""
    weight = d.choice(["self.w#", "self.w#.transpose(0, 1)", "self.w# - self.w#.mean((1, 2, 3), keepdim=True)"])
    stride = d.choice(["", ", stride=2", ", None, 1, 1"])
    padding = "" if "1, 1" in stride else ", padding=1"
    init = "self.w# = nn.Parameter(torch.randn(4, 4, 3, 3) * 0.2)"
    return Layer("functional conv", (init,), (f"x = F.conv2d(x, {weight}{stride}{padding})",))


def pool(d: Random) -> Layer:
    kernel = d.choice([2, 3])
    stride, padding = d.choice([None, 1, 2]), d.choice([None, 1])
    ceil = d.choice([None, None, True])
    kind = d.choice(["MaxPool2d", "MaxPool2d", "AvgPool2d", "AvgPool2d", "LPPool2d"])
    if kind == "MaxPool2d":
        more = keywords(stride=stride, padding=padding, ceil_mode=ceil, dilation=d.choice([None, None, 2]))
        return Layer("max pool", (), (f"x = F.max_pool2d(x, {kernel}{more})",))
    if kind == "AvgPool2d":
        more = keywords(
            stride=stride, padding=padding, ceil_mode=ceil, count_include_pad=d.choice([None, False]),
            divisor_override=d.choice([None, None, 3]),
        )  # fmt: skip
        return Layer("avg pool", (), (f"x = F.avg_pool2d(x, {kernel}{more})",))
    return Layer("lp pool", (), (f"x = F.lp_pool2d(x.sigmoid(), 2, {kernel}{keywords(stride=stride)})",))


def adaptive_pool(d: Random) -> Layer:
    size = d.choice([(None, 5), 7, (6, 9), (x := d.randrange(3, 8), x)])
    kind = d.choice(["avg", "max"])
    return Layer(f"adaptive {kind}", (), (f"x = F.adaptive_{kind}_pool2d(x, {size!r})",))


def unpool(d: Random) -> Layer:
    return Layer(
        "unpool",
        (),
        (
            "p, i = F.max_pool2d(x, 2, return_indices=True)",
            "x = x + F.max_unpool2d(p, i, 2, output_size=x.shape[2:])",
        ),
    )


NORMS = {
    "batch norm": "nn.BatchNorm2d(4{})",
    "instance norm": "nn.InstanceNorm2d(4, affine=True{})",
    "group norm": "nn.GroupNorm(2{}, 4)",
}


def norm(d: Random) -> Layer:
    kind = d.choice(["batch norm", "batch norm", "batch norm", "instance norm", "group norm", "group norm"])
    more = {
        "batch norm": ["", "", ", momentum=None", ", momentum=0.3", ", affine=False", ", track_running_stats=False"],
        "instance norm": ["", ", track_running_stats=True"],
        "group norm": [""],
    }[kind]
    init = [f"self.norm# = {NORMS[kind].format(d.choice(more))}"]
    if kind == "batch norm" and d.random() < 0.2 and "False" not in init[0]:
        init.append("self.norm#.eval()")
    return Layer(kind, tuple(init), ("x = self.norm#(x)",))


def hand_norm(d: Random) -> Layer:
    """Norms written by hand, or over channels."""
    forms = {
        "layer norm last": "x = self.norm#(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
        "layer norm channels": "x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-3).sqrt()",
        "image norm": "x = (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-3)",
        "batch moments": "x = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True) + 0.1).sqrt()",
        "global max": "x = x / (x.abs().amax((1, 2, 3), keepdim=True) + 1.0)",
        "normalize": "x = F.normalize(x, dim=1)",
        "response norm": "x = x / (1 + x.norm(p=2, dim=(2, 3), keepdim=True)) * 3",
        "local response": "x = F.local_response_norm(x, 3)",
        "rms": "x = F.rms_norm(x.movedim(1, -1), (4,), self.scale#).movedim(-1, 1)",
    }
    kind = d.choice(list(forms))
    init = {"layer norm last": ("self.norm# = nn.LayerNorm(4)",), "rms": ("self.scale# = nn.Parameter(torch.ones(4))",)}
    return Layer(kind, init.get(kind, ()), (forms[kind],))


def activation(d: Random) -> Layer:
    forms = [
        "F.relu(x)", "F.gelu(x)", "F.silu(x)", "F.leaky_relu(x, 0.2)", "F.elu(x)", "F.hardswish(x)", "F.softplus(x)",
        "x.tanh()", "x.sigmoid()", "F.mish(x)", "x.softmax(1)", "F.glu(torch.cat([x, x.flip(1)], 1), 1)", "x.sin()",
        "F.hardtanh(x)", "F.celu(x)", "F.selu(x)", "torch.where(x > 0, x, 0.1 * x)", "x.clamp(-1, 1)",
        "x.log_softmax(dim=1)", "F.softmin(x, dim=1)", "torch.logaddexp(x, -x)", "x.abs().sqrt()", "F.logsigmoid(x)",
        "x.square().add(1).rsqrt()", "x * torch.rsqrt(1 + x * x)", "torch.maximum(x, 0.5 * x)",
        "F.threshold(x, 0.1, 0.0)",
    ]  # fmt: skip
    if d.random() < 0.15:
        return Layer("prelu", ("self.act# = nn.PReLU(4)",), ("x = self.act#(x)",))
    return Layer("activation", (), (f"x = {d.choice(forms)}",))


def tokens(d: Random) -> Layer:
    """Linear layers and attention on positions as tokens; at low resolution, so that it stays small."""
    forms = {
        "linear last": (("self.lin# = nn.Linear(4, 4)",), ("x = x + self.lin#(x.movedim(1, -1)).movedim(-1, 1)",)),
        "mlp": (
            ("self.mlp# = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))",),
            ("s = x.flatten(2).transpose(1, 2)", "x = x + self.mlp#(s).transpose(1, 2).reshape(x.shape)"),
        ),
        "attention": (
            ("self.att# = nn.MultiheadAttention(4, 2, batch_first=True)",),
            (
                "p = F.adaptive_avg_pool2d(x, 3)",
                "s = p.flatten(2).transpose(1, 2)",
                "s = self.att#(s, s, s, need_weights=False)[0].transpose(1, 2).reshape(p.shape)",
                "x = x + F.interpolate(s, x.shape[2:])",
            ),
        ),
        "whole attention": (
            ("self.qkv# = nn.Linear(4, 12)",),
            (
                "q, k, v = self.qkv#(x.flatten(2).transpose(1, 2)).chunk(3, -1)",
                "x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)",
            ),
        ),
        "linear attention": (
            ("self.qkv# = nn.Conv2d(4, 12, 1)",),
            (
                "q, k, v = self.qkv#(x).flatten(2).chunk(3, 1)",
                "x = x + (k.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).matmul(q).reshape(x.shape)",
            ),
        ),
        "class token": (
            ("self.cls# = nn.Parameter(torch.randn(1, 1, 4))", "self.lin# = nn.Linear(4, 4)"),
            (
                "s = torch.cat([self.cls#.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1)",
                "s = self.lin#(s).tanh()",
                "x = s[:, 1:].transpose(1, 2).reshape(x.shape) + s[:, 0, :, None, None]",
            ),
        ),
        "einsum": (
            ("self.mix# = nn.Parameter(torch.randn(4, 4) * 0.5)",),
            ("x = torch.einsum('nchw,cd->ndhw', x, self.mix#)",),
        ),
    }
    kind = d.choice(list(forms))
    return Layer(kind, *forms[kind])


def resize(d: Random) -> Layer:
    mode = d.choice(["nearest", "bilinear", "bilinear", "bicubic", "area", "nearest-exact"])
    size = d.choice(["scale_factor=2", "scale_factor=0.5", "scale_factor=1.5", "size=(9, 11)", "scale_factor=(1, 2)"])
    more = keywords(align_corners=d.choice([None, True, False])) if mode.startswith("bi") else ""
    return Layer("interpolate", (), (f"x = F.interpolate(x, {size}, mode={mode!r}{more})",))


def pad(d: Random) -> Layer:
    amounts = tuple(d.choice([0, 1, 2]) for _ in range(4))
    if d.random() < 0.3:
        amounts = tuple(d.choice([-1, 0, 1]) for _ in range(4))
    mode = d.choice(["constant", "reflect", "replicate", "circular"])
    more = ", value=0.5" if mode == "constant" and d.random() < 0.3 else ""
    return Layer("pad", (), (f"x = F.pad(x, {amounts!r}, mode={mode!r}{more})",))


def normed_weights(d: Random) -> Layer:
    kind = d.choice(["weight_norm", "spectral_norm", "spectral_norm"])
    init = f"self.conv# = torch.nn.utils.parametrizations.{kind}(nn.Conv2d(4, 4, 3, padding=1))"
    return Layer(kind, (init,), ("x = self.conv#(x)",))


VALUES: dict[str, tuple[Kind, float]] = {
    "conv": (conv, 3.0), "same conv": (same_conv, 3.0), "transposed": (transposed, 1.0),
    "functional conv": (functional_conv, 0.5), "pool": (pool, 1.5), "adaptive pool": (adaptive_pool, 0.5),
    "unpool": (unpool, 0.2), "norm": (norm, 2.5), "hand norm": (hand_norm, 1.0), "activation": (activation, 2.0),
    "tokens": (tokens, 1.2), "resize": (resize, 1.0), "pad": (pad, 0.7), "normed weights": (normed_weights, 0.4),
}  # fmt: skip
"""Each kind, and how often it is drawn."""
