"""The law of fused halos with drawn cases: chains of layers with drawn arguments, image sizes, cuts and grids."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from law import Grid, image
from ranks import run_on
from repeats import steps

GRIDS = [(2, 1), (1, 2), (3, 1), (2, 2), (1, 3), (4, 1)]
more = settings(max_examples=settings().max_examples, suppress_health_check=list(HealthCheck))


class Sum(nn.Module):
    """x + f(x), or the two side by side where f changes the extents."""

    def __init__(self, inner: nn.Module, inplace: bool):
        super().__init__()
        self.inner, self.inplace = inner, inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.shape != x.shape:
            return y
        if not self.inplace:
            return x + y
        y = y * 1.0
        y += x
        return y


@st.composite
def layers(draw: st.DrawFn, depth: int = 1) -> nn.Module:
    """A layer of 4 channels."""
    pair = st.tuples(*[st.integers(1, 4)] * 2)
    kind = draw(st.sampled_from(["conv", "conv", "conv", "pool", "pointwise", "transposed", "other", "sum"]))
    if kind == "conv":
        padding = draw(st.one_of(st.just("same"), st.tuples(*[st.integers(0, 3)] * 2)))
        return nn.Conv2d(
            4, 4, draw(pair), 1 if padding == "same" else draw(st.sampled_from([1, 1, 2])), padding,
            draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 2])),
            padding_mode=draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])),
        )  # fmt: skip
    if kind == "pool":
        k = draw(st.integers(1, 4))
        pool = draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))
        return pool(k, draw(st.sampled_from([1, 2])), draw(st.integers(0, k // 2)), ceil_mode=draw(st.booleans()))
    if kind == "transposed":
        stride = draw(st.sampled_from([1, 2]))
        return nn.ConvTranspose2d(4, 4, draw(pair), stride, draw(st.integers(0, 1)), draw(st.integers(0, stride - 1)))
    if kind == "sum" and depth:
        return Sum(nn.Sequential(*draw(st.lists(layers(depth - 1), min_size=1, max_size=3))), draw(st.booleans()))
    if kind == "other":
        mode = draw(st.sampled_from(["nearest", "bilinear", "bicubic"]))
        pads = draw(st.tuples(*[st.integers(-1, 3)] * 4))
        found = [nn.Upsample(scale_factor=2, mode=mode), nn.ConstantPad2d(pads, 0.5), nn.BatchNorm2d(4).eval()]
        return draw(st.sampled_from(found))
    return draw(st.sampled_from([nn.Tanh(), nn.ReLU(inplace=True), nn.GELU(), nn.SiLU(inplace=True), nn.PReLU(4)]))


@st.composite
def cut_images(draw: st.DrawFn) -> tuple[tuple[int, ...], Grid]:
    """An image's shape and a grid that cuts it."""
    spatial = draw(st.sampled_from(GRIDS))
    extents = [draw(st.integers(6, 33)) for _ in range(2)]
    cuts = None
    if draw(st.booleans()):
        cuts = tuple(
            (0, *sorted(draw(st.lists(st.integers(0, e), min_size=n - 1, max_size=n - 1))), e)
            for n, e in zip(spatial, extents, strict=True)
        )
    return (draw(st.integers(1, 2)), 4, *extents), Grid(spatial, cuts=cuts)


@more
@given(st.lists(layers(), min_size=2, max_size=6), cut_images(), st.booleans())
def test_chains_of_drawn_layers(chain: list[nn.Module], case: tuple[tuple[int, ...], Grid], needs_grad: bool) -> None:
    size, grid = case
    module = nn.Sequential(nn.Conv2d(4, 4, 1), *chain).double()
    try:
        y = module(image(*size))
        y.sum().backward()
        outputs = y.numel()
    except (RuntimeError, ValueError):
        outputs = 0  # torch itself does not take the case
    assume(0 < outputs < 200_000)
    for of_rank in run_on(grid.world, steps, module, [size] * 3, grid, True, needs_grad):
        for number, one in enumerate(of_rank):
            assert not one["wrong"], f"step {number} of {module} on {size}, {grid}: {one['wrong']}"
