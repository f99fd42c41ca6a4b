"""The sweep: layers of random sizes, on which the predictor of times is fitted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log2, prod

from layers import LOSSES, POINTWISE, Case, Shape

CHANNELS = (
    3,
    8,
    16,
    24,
    32,
    40,
    48,
    64,
    80,
    96,
    112,
    128,
    144,
    192,
    224,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
    1536,
    2048,
)


@dataclass(frozen=True)
class Scale:
    """How large the cases of a sweep are: elements of the larger of input and output, and operations, at most."""

    smallest: int
    largest: int
    operations: float
    dtypes: tuple[str, ...]


SCALES = {
    "cuda": Scale(2**15, 2**29, 1e12, ("float32", "float32", "bfloat16")),
    "cpu": Scale(2**10, 2**22, 1.5e9, ("float32",)),
}
"""For each kind of device; in bfloat16 a CPU without instructions for it says nothing about others."""


class Draw:
    """Random sizes for layers, the same for the same seed."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self.scale, self.random = scale, random.Random(seed)

    def elements(self) -> float:
        """A number of elements, evenly on a logarithmic scale."""
        return 2 ** self.random.uniform(log2(self.scale.smallest), log2(self.scale.largest))

    def dims(self) -> int:
        """Mostly 2, at times 1 or 3."""
        return self.random.choices((1, 2, 3), (1, 14, 3))[0]

    def image(self, channels: int, dims: int, elements: float) -> Shape:
        """A batch of that many channels, of about that many elements: large images in small batches, or the reverse."""
        batch = self.random.choice((1, 1, 1, 2, 2, 4, 8, 16, 32, 64))
        extent = max(2.0, elements / channels / batch) ** (1 / dims)
        extents = [max(2, round(extent * 2 ** self.random.uniform(-0.2, 0.2))) for _ in range(dims)]
        if self.random.random() < 0.6:  # as in most models: square, and halved a few times before
            step = 32 if extent > 256 else 8 if extent > 64 else 4 if extent > 8 else 1
            extents = [max(2, round(extent / step) * step)] * dims
        return (batch, channels, *extents)

    def channels(self) -> int:
        """A number of channels."""
        return self.random.choice(CHANNELS[1:])

    def cases(self) -> Iterator[Case]:
        """Cases without end: layers by weight, types in turn."""
        names, weights = list(DRAWN), [weight for weight, _ in DRAWN.values()]
        while True:
            case = DRAWN[self.random.choices(names, weights)[0]][1](self)
            dtype = self.random.choice(self.scale.dtypes)
            if case is not None and max(map(prod, case.shapes)) <= self.scale.largest:
                yield Case(case.layer, case.shapes, case.options, dtype, case.gradient)


def draw_plain(draw: Draw) -> Case | None:
    """A convolution as most models have them: k1 or k3 on images, at times volumes, all channels with all."""
    r, dims = draw.random, draw.random.choices((2, 3), (5, 1))[0]
    inputs, outputs = (draw.channels() if dims == 2 else r.choice((1, 4, 8, 12, 16, 24, 32, 64, 128)) for _ in range(2))
    if r.random() < 0.4:
        outputs = r.choice((inputs, inputs, 2 * inputs, max(8, inputs // 2), max(8, inputs // 4)))
    kernel, stride = r.choices((1, 3, 5, 7), (8, 14, 1, 1))[0], r.choices((1, 2), (6, 1))[0]
    shape = draw.image(inputs, dims, draw.elements() / max(1, outputs / inputs / stride**dims))
    work = 2 * prod(shape) / stride**dims * outputs * kernel**dims
    if (
        min(shape[2:]) < kernel
        or work > draw.scale.operations
        or outputs * inputs * kernel**dims > draw.scale.largest / 4
    ):
        return None
    options = {"dims": dims, "inputs": inputs, "outputs": outputs, "kernel_size": [kernel] * dims, "stride": stride}
    options |= {"padding": [kernel // 2] * dims, "dilation": 1, "groups": 1, "bias": r.random() < 0.3}
    return Case("conv", (shape,), options, gradient=r.random() < 0.97)


def draw_conv(draw: Draw) -> Case | None:
    """A convolution: k1 to k7, wide ones too, with strides, dilation, groups, or depthwise."""
    r, dims = draw.random, draw.dims()
    inputs, outputs = r.choice(CHANNELS), draw.channels()
    kernel = r.choices((1, 3, 5, 7), (5, 8, 2, 2))[0]
    sizes = [kernel] * dims
    if dims > 1 and r.random() < 0.12:
        sizes = [1] * dims
        sizes[r.randrange(dims)] = r.choice((3, 5, 7))
    stride = r.choices((1, 2, 4), (10, 3, 1 if kernel > 3 else 0))[0]
    dilation = r.choices((1, 2, 6), (18, 1, 1))[0]
    groups = 1
    if r.random() < 0.3:
        groups = inputs if r.random() < 0.7 else r.choice([g for g in (2, 4, 8, 32) if inputs % g == 0] or [1])
        outputs = inputs if groups == inputs else outputs // groups * groups or groups
    shape = draw.image(inputs, dims, draw.elements() / max(1, outputs / inputs / stride**dims))
    if any(extent < dilation * (k - 1) + 1 for extent, k in zip(shape[2:], sizes, strict=True)):
        return None
    work = 2 * prod(shape) / stride**dims * outputs * prod(sizes) / groups
    if work > draw.scale.operations or outputs * inputs * prod(sizes) / groups > draw.scale.largest / 4:
        return None
    options = {"dims": dims, "inputs": inputs, "outputs": outputs, "kernel_size": sizes, "stride": stride}
    options |= {"padding": [dilation * (k - 1) // 2 for k in sizes], "dilation": dilation, "groups": groups}
    return Case("conv", (shape,), options | {"bias": r.random() < 0.5}, gradient=inputs > 3 and r.random() < 0.93)


def draw_transposed(draw: Draw) -> Case | None:
    """A transposed convolution, k2 to k4, that doubles the extents."""
    r, dims = draw.random, draw.dims()
    inputs, outputs = draw.channels(), draw.channels()
    kernel, padding = r.choices(((2, 0), (4, 1), (3, 1)), (6, 1, 1))[0]
    shape = draw.image(inputs, dims, draw.elements() / max(1, 2**dims * outputs / inputs))
    work = 2 * prod(shape) * outputs * kernel**dims
    if work > draw.scale.operations or outputs * inputs * kernel**dims > draw.scale.largest / 4:
        return None
    options = {
        "dims": dims,
        "inputs": inputs,
        "outputs": outputs,
        "kernel_size": kernel,
        "stride": 2,
        "padding": padding,
    }
    return Case("transposed", (shape,), options)


def draw_linear(draw: Draw) -> Case | None:
    """A linear layer on rows, tokens, or positions of an image."""
    r = draw.random
    inputs, outputs = draw.channels(), r.choice((10, 1000, 4096, *CHANNELS[3:]))
    rows = max(1, round(draw.elements() / max(inputs, outputs)))
    if 2.0 * rows * inputs * outputs > draw.scale.operations or inputs * outputs > draw.scale.largest / 4:
        return None
    lead = (rows,) if rows < 64 or r.random() < 0.4 else (r.choice((1, 2, 4)), max(1, rows // 4))
    return Case("linear", ((*lead, inputs),), {"inputs": inputs, "outputs": outputs, "bias": r.random() < 0.8})


def draw_product(draw: Draw) -> Case | None:
    """Products of batches of matrices, as attention written out by hand has them."""
    r = draw.random
    heads, tokens, width = (
        r.choice((1, 8, 24, 96, 512)),
        r.choice((16, 49, 64, 196, 256, 1024)),
        r.choice((24, 32, 64, 128)),
    )
    left, right = (heads, tokens, width), (heads, width, tokens)
    if r.random() < 0.5:
        left, right = (heads, tokens, tokens), (heads, tokens, width)
    fits = (
        heads * tokens * max(tokens, width) <= draw.scale.largest
        and 2.0 * heads * tokens**2 * width <= draw.scale.operations
    )
    return Case("matmul", (left, right)) if fits else None


def draw_attention(draw: Draw) -> Case | None:
    """Attention of heads over tokens."""
    r = draw.random
    batch, heads, width = r.choice((1, 2, 8, 32, 64)), r.choice((1, 3, 6, 12, 16)), r.choice((32, 64, 96, 128))
    tokens = r.choice((16, 50, 100, 256, 400, 784, 1600, 4096))
    work = 4.0 * batch * heads * tokens**2 * width
    fits = work <= draw.scale.operations and batch * heads * tokens * max(width, tokens) <= 2 * draw.scale.largest
    return Case("attention", ((batch, heads, tokens, width),) * 3) if fits else None


def draw_norm(draw: Draw) -> Case:
    """A norm of a batch, an instance, groups, or tokens."""
    kind = draw.random.choices(("batch", "instance", "group", "layer"), (6, 2, 2, 3))[0]
    channels, dims = draw.channels(), draw.dims()
    shape = draw.image(channels, dims, draw.elements())
    if kind == "layer":
        return Case("layer", ((shape[0], max(1, prod(shape[2:])), channels),), {"width": channels})
    if kind == "group":
        return Case("group", (shape,), {"groups": draw.random.choice((1, 2, 4, 8)), "channels": channels})
    return Case(kind, (shape,), {"dims": dims, "channels": channels})


def draw_pool(draw: Draw) -> Case:
    """A pool of maxima or means, halving or not; means and adaptive pools over everything."""
    r, dims = draw.random, draw.dims()
    shape = draw.image(draw.channels(), dims, draw.elements())
    if r.random() < 0.3:
        if r.random() < 0.4:
            return Case("mean", (shape,), {"dims": dims})
        return Case("adaptive", (shape,), {"dims": dims, "size": r.choice((1, 1, 1, 7))})
    kernel, stride, padding = r.choice(((2, 2, 0), (3, 2, 1), (3, 1, 1))[: 3 if min(shape[2:]) > 2 else 1])
    options = {
        "kind": r.choice(("max", "avg")),
        "dims": dims,
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
    }
    return Case("pool", (shape,), options)


def draw_pointwise(draw: Draw) -> Case:
    """An activation, a sum or a product, with a broadcast operand too, dropout."""
    r = draw.random
    shape = draw.image(draw.channels(), draw.dims(), draw.elements())
    kind = r.choices(("pointwise", "add", "multiply", "dropout"), (6, 3, 2, 1))[0]
    if kind == "pointwise":
        name = r.choices(list(POINTWISE), [6, *[1] * (len(POINTWISE) - 1)])[0]
        return Case("pointwise", (shape,), {"name": name})
    if kind == "dropout":
        return Case("dropout", (shape,), {"rate": 0.1})
    other = shape if r.random() < 0.7 else (*shape[:2], *(1 for _ in shape[2:]))
    return Case(kind, (shape, other))


def draw_move(draw: Draw) -> Case:
    """What only moves values: joining, padding, permuting, rolling, resizing."""
    r, dims = draw.random, draw.dims()
    kind = r.choices(("cat", "resized", "pad", "copy", "roll"), (5, 4, 1, 4, 1))[0]
    if kind == "cat":
        count = r.choice((2, 2, 2, 3, 4, 8))
        shape = draw.image(draw.channels(), dims, draw.elements() / count)
        others = tuple((shape[0], draw.channels(), *shape[2:]) for _ in range(count - 1))
        return Case("cat", (shape, *others), {"dim": 1})
    shape = draw.image(draw.channels(), dims, draw.elements() / (2**dims if kind == "resized" else 1))
    if kind == "resized":
        return Case("resized", (shape,), {"dims": dims, "scale": 2, "mode": r.choice(("nearest", "linear", "linear"))})
    if kind == "pad":
        return Case("pad", (shape,), {"by": [1] * (2 * dims), "mode": "constant"})
    if kind == "roll":
        return Case("roll", ((shape[0], *shape[2:3], *shape[2:3], shape[1]),))
    last = [0, *range(2, 2 + dims), 1]
    return Case("copy", (shape,), {"order": last if r.random() < 0.7 else [0, 1, *reversed(range(2, 2 + dims))]})


def draw_scores(draw: Draw) -> Case:
    """Softmax, and the losses."""
    r = draw.random
    kind = r.choice(("softmax", "softmax", "log_softmax", "entropy", "loss"))
    shape = draw.image(r.choice((2, 5, 21, 100)), 2, draw.elements())
    if kind in ("softmax", "log_softmax"):
        tokens = r.choice((49, 196, 1024))
        rows = max(1, round(draw.elements() / tokens))
        return Case(kind, ((rows, tokens),), {"dim": -1}) if r.random() < 0.6 else Case(kind, (shape,), {"dim": 1})
    if kind == "loss":
        return Case("loss", (shape, shape), {"name": r.choice(list(LOSSES))})
    return Case("entropy", (shape,))


DRAWN: dict[str, tuple[int, Callable[[Draw], Case | None]]] = {
    "plain": (40, draw_plain),
    "conv": (24, draw_conv),
    "transposed": (4, draw_transposed),
    "linear": (7, draw_linear),
    "product": (2, draw_product),
    "attention": (4, draw_attention),
    "norm": (13, draw_norm),
    "pool": (6, draw_pool),
    "pointwise": (8, draw_pointwise),
    "move": (8, draw_move),
    "scores": (3, draw_scores),
}
"""The weight of each kind of layer in a sweep, and how it is drawn: most weight where time is hardest to predict."""


def sweep(device: str, count: int, seed: int = 0) -> list[Case]:
    """That many cases for a kind of device, in random order: any first part of them is a sweep too."""
    cases = Draw(SCALES[device], seed).cases()
    return [next(cases) for _ in range(count)]
