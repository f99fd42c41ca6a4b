"""Samples of our own: layers and losses on images of odd extents, in one, two and three dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hunt.rules_draw import Call, Draw, call
from hunt.rules_image_calls import CALLS
from mural.shard.ops.reduce.losses import dice_loss


def conv(d: Draw, dims: int) -> Call:
    """A convolution."""
    weight = d.normal(4, d.of(3, 3, 1), *d.ints(dims, 1, 4))
    given = {"padding": d.of(0, 1, "same", "valid", d.ints(dims, 0, 3)), "dilation": d.of(1, 1, 2)}
    given |= {"stride": 1 if given["padding"] == "same" else d.of(1, 2, d.ints(dims, 1, 3))}
    groups = 3 if weight.shape[1] == 1 else 1
    weight = weight.repeat(3, *[1] * (dims + 1)) if groups == 3 else weight
    bias = d.of(None, d.normal(weight.shape[0]))
    return call(getattr(F, f"conv{dims}d"), d.image(dims), weight, bias, groups=groups, **given)


def transposed(d: Draw, dims: int) -> Call:
    """A transposed convolution."""
    stride = d.int(1, 3)
    given = {"stride": stride, "padding": d.int(0, 2), "output_padding": d.int(0, stride - 1), "dilation": d.int(1, 2)}
    weight = d.normal(3, 2, *d.ints(dims, 1, 4))
    return call(getattr(F, f"conv_transpose{dims}d"), d.image(dims), weight, d.of(None, d.normal(2)), **given)


def pool(d: Draw, dims: int, kind: str) -> Call:
    """A pool, with positions where it has them."""
    kernel = d.ints(dims, 1, 3)
    given: dict[str, Any] = {"stride": d.of(None, d.int(1, 3)), "padding": tuple(d.int(0, k // 2) for k in kernel)}
    given |= {"ceil_mode": d.of(True, False)}
    if kind == "max":
        given |= {"dilation": d.of(1, 1, 2), "return_indices": d.of(True, False)}
    else:
        given |= {"count_include_pad": d.of(True, False)}
    return call(getattr(F, f"{kind}_pool{dims}d"), d.image(dims), kernel, **given)


def adaptive(d: Draw, dims: int, kind: str) -> Call:
    """An adaptive pool."""
    sizes = tuple(d.of(1, 2, 3, 5, 7, None) for _ in range(dims))
    return call(getattr(F, f"adaptive_{kind}_pool{dims}d"), d.image(dims), sizes if dims > 1 else sizes[0] or 2)


def resampled(d: Draw) -> Call:
    """An interpolation."""
    dims = d.int(1, 3)
    mode = d.of("nearest", "nearest-exact", "area", {1: "linear", 2: d.of("bilinear", "bicubic"), 3: "trilinear"}[dims])
    align = {"align_corners": d.of(True, False)} if mode.endswith(("linear", "cubic")) else {}
    amount = {"size": d.ints(dims, 2, 13)} if d.of(True, False) else {"scale_factor": d.of(0.5, 2, 3, 1.7)}
    anti = {"antialias": True} if mode in ("bilinear", "bicubic") and d.of(True, False, False) else {}
    return call(F.interpolate, d.image(dims), mode=mode, **amount, **align, **anti)


def padded(d: Draw) -> Call:
    """A pad, or a crop."""
    dims, mode = d.int(1, 3), d.of("constant", "reflect", "replicate", "circular")
    low = -2 if d.of(True, False) else 0
    value = {"value": d.of(0.0, 1.5, None)} if mode == "constant" else {}
    return call(F.pad, d.image(dims), d.ints(2 * dims, low, 3), mode, **value)


def normed(d: Draw) -> Call:
    """A norm of images."""
    x = d.image(d.int(1, 3), channels=4)
    kind, four = d.of("group", "instance", "batch", "layer", "normalize", "local", "rms"), (d.normal(4), d.normal(4))
    if kind == "group":
        return call(F.group_norm, x, d.of(1, 2, 4), *four)
    if kind == "instance":
        return call(F.instance_norm, x, None, None, *four)
    if kind == "batch":
        return call(F.batch_norm, x, d.normal(4), d.normal(4).abs() + 0.1, *four, training=d.of(True, False))
    if kind == "normalize":
        return call(F.normalize, x, p=d.of(1.0, 2.0, 3.0), dim=d.of(1, -1, 2))
    if kind == "local":
        return call(F.local_response_norm, x, d.int(1, 3))
    size = list(x.shape[d.int(1, x.ndim - 1) :])
    weight = d.of(None, d.normal(*size))
    if kind == "rms":
        return call(F.rms_norm, x, size, weight)
    return call(F.layer_norm, x, size, weight, None if weight is None else d.normal(*size))


def losses(d: Draw) -> Call:
    """A loss of an image and its target."""
    x = d.image(d.int(1, 2))
    y, mean = d.normal(*x.shape), {"reduction": d.of("mean", "sum", "none")}
    labels = d.whole(0, 3, x.shape[0], *x.shape[2:])
    labels = d.of(labels, torch.where(labels == 2, -100, labels))
    weight = d.of(None, d.normal(3).abs() + 0.1)
    name = d.of(
        "ce",
        "ce",
        "soft",
        "nll",
        "bce",
        "logits",
        "mse",
        "l1",
        "smooth",
        "huber",
        "kl",
        "poisson",
        "margin",
        "gauss",
        "dice",
    )
    smooth = {"label_smoothing": d.of(0.0, 0.1)}
    weights = {"weight": y.abs()} if d.of(True, False, False) else {}
    return {
        "ce": lambda: call(F.cross_entropy, x, labels, weight, **mean, **smooth),
        "soft": lambda: call(F.cross_entropy, x, y.softmax(1), weight, **mean, **smooth),
        "nll": lambda: call(F.nll_loss, x.log_softmax(1), labels, weight, **mean),
        "bce": lambda: call(F.binary_cross_entropy, x.sigmoid(), y.sigmoid(), d.of(None, y.abs()), **mean),
        "logits": lambda: call(
            F.binary_cross_entropy_with_logits,
            x,
            y.sigmoid(),
            d.of(None, y.abs()),
            pos_weight=d.of(None, d.normal(x.shape[-1]).abs()),
            **mean,
        ),
        "mse": lambda: call(F.mse_loss, x, y, **mean, **weights),
        "l1": lambda: call(F.l1_loss, x, y, **mean, **weights),
        "smooth": lambda: call(F.smooth_l1_loss, x, y, beta=d.of(0.0, 0.5, 1.0), **mean),
        "huber": lambda: call(F.huber_loss, x, y, delta=d.of(0.5, 1.0), **mean, **weights),
        "kl": lambda: call(
            F.kl_div,
            x.log_softmax(1),
            y.log_softmax(1),
            log_target=d.of(True, False),
            reduction=d.of("mean", "sum", "none", "batchmean"),
        ),
        "poisson": lambda: call(F.poisson_nll_loss, x, y.abs(), d.of(True, False), d.of(True, False), **mean),
        "margin": lambda: call(F.soft_margin_loss, x, y.sign(), **mean),
        "gauss": lambda: call(F.gaussian_nll_loss, x, y, y.abs() + 0.1, **mean),
        "dice": lambda: call(dice_loss, x, labels) if x.ndim > 2 else call(F.mse_loss, x, y),
    }[name]()


def patched(d: Draw) -> Call:
    """Patches of an image, and back."""
    kernel, given = d.ints(2, 1, 3), {"dilation": d.int(1, 2), "padding": d.int(0, 1), "stride": d.int(1, 3)}
    x = d.normal(d.int(1, 3), 3, *d.ints(2, 5, 11))
    if d.of(True, False):
        return call(F.unfold, x, kernel, **given)
    columns = F.unfold(x.clone(), kernel, **given)
    return call(F.fold, columns, tuple(x.shape[2:]), kernel, **given)


def sampled(d: Draw) -> Call:
    """An image sampled at positions."""
    x = d.image()
    grid = d.normal(x.shape[0], *d.extents(2), 2) * d.of(0.3, 0.6, 1.0)
    mode, padding = d.of("bilinear", "nearest", "bicubic"), d.of("zeros", "border", "reflection")
    return call(F.grid_sample, x, grid, mode, padding, align_corners=d.of(True, False))


def unpooled(d: Draw) -> Call:
    """What a maximum pool took, at its place again."""
    dims, kernel = d.int(1, 3), d.int(1, 3)
    x, padding = d.image(dims), min(d.int(0, 1), kernel // 2)
    values, positions = getattr(F, f"max_pool{dims}d")(x, kernel, None, padding, return_indices=True)
    return call(getattr(F, f"max_unpool{dims}d"), values, positions, kernel, None, padding, x.shape[2:])


def in_sequence(d: Draw) -> Call:
    """One step of a recurrent layer on sequences of positions."""
    kind, inputs, hidden = d.of("gru", "lstm", "rnn_tanh", "rnn_relu"), 3, 2
    rows = {"gru": 3, "lstm": 4}.get(kind, 1) * hidden
    x, h = d.normal(d.int(4, 9), inputs), d.normal(1, hidden)
    h = h.expand(x.shape[0], hidden).clone()
    weights = (d.normal(rows, inputs), d.normal(rows, hidden), d.normal(rows), d.normal(rows))
    return call(getattr(torch, f"{kind}_cell"), x, (h, h * 2) if kind == "lstm" else h, *weights)


def rare_layers(d: Draw) -> Call:
    """Layers that torch has no samples of."""
    x, dims = d.image(), d.int(1, 3)
    return d.of(
        call(getattr(F, f"lp_pool{dims}d"), d.image(dims), d.of(1.0, 2.0, 3.0), d.int(1, 3), d.of(None, 1, 2)),
        call(F.upsample, x, scale_factor=2, mode=d.of("nearest", "bilinear")),
        call(torch.native_channel_shuffle, x, 3),
        call(torch.feature_dropout, x, 0.4, True),
        call(F.dropout1d, d.image(1), 0.4),
        call(torch.special.multigammaln, x.abs() + 3, 2),
        call(F.affine_grid, d.normal(2, 2, 3), [2, 3, *d.extents(2)], align_corners=d.of(True, False)),
        call(torch.special.expit, x),
        call(torch.special.gammaln, x),
        call(torch.special.psi, x),
        call(torch.softmax, x, d.dim(x)),
        call(F.softmin, x, d.dim(x)),
        call(torch.Tensor.type_as, x, torch.zeros(1, dtype=torch.float32)),
        call(torch.Tensor.new_tensor, x, [[1.0, 2.0]]),
    )


IMAGES: dict[str, Callable[[Draw], Call]] = {
    **{f"conv{n}d": lambda d, n=n: conv(d, n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": lambda d, n=n: transposed(d, n) for n in (1, 2, 3)},
    **{f"{k}_pool{n}d": lambda d, n=n, k=k: pool(d, n, k) for n in (1, 2, 3) for k in ("max", "avg")},
    **{f"adaptive_{k}_pool{n}d": lambda d, n=n, k=k: adaptive(d, n, k) for n in (1, 2, 3) for k in ("max", "avg")},
    **CALLS,
    "interpolate": resampled,
    "pad": padded,
    "norms": normed,
    "losses": losses,
    "patches": patched,
    "grid_sample": sampled,
    "unpool": unpooled,
    "recurrent": in_sequence,
    "rare layers": rare_layers,
}
"""By name."""
