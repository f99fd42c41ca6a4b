"""The tile law: disjoint tiles of a rule, each from its own window, give torch's result, and their gradients add up.

Every case is a frozen dataclass of plain arguments, so that a case which was once wrong stays here as an example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

import mural
from mural.geometry import Box, Interval, Remap, Window
from mural.shard.ops.windowed.adaptive import adaptive_rule
from mural.shard.ops.windowed.conv import conv_rule, each, transposed_rule
from mural.shard.ops.windowed.pad import constant_rule, remap_rule
from mural.shard.ops.windowed.pool import avg_pool_rule, max_pool_rule
from mural.shard.ops.windowed.resample import Taps, interpolate_rule, shuffle_rule, target_sizes, unshuffle_rule
from mural.shard.rules import Windowed, tile

TOLERANCE = 1e-10

Cut = tuple[int, ...]
"""Where a dim of the output is cut, in percent of its extent; the parts that are empty are left out."""

Ints = tuple[int, ...]
Drawn = st.SearchStrategy


@dataclass(frozen=True)
class Case:
    """An operation with its arguments, and the input that it gets."""

    extents: Ints

    @property
    def lead(self) -> Ints:
        """The dims before the image's."""
        return 2, 3

    @property
    def n(self) -> int:
        return len(self.extents)

    @property
    def parameters(self) -> dict[str, Ints | None]:
        """The shapes of what the operation learns."""
        return {}

    def plain(self, x: Tensor, **parameters: Tensor) -> Tensor:
        raise NotImplementedError

    def rule(self, **parameters: Tensor) -> Windowed:
        raise NotImplementedError

    def image(self, draw: Callable[..., Tensor]) -> Tensor:
        return draw(*self.lead, *self.extents)


# --- the law ------------------------------------------------------------------------------------------------


def tiles(shape: Ints, cuts: tuple[Cut, ...]) -> list[Box]:
    """The output divided at the cuts, without empty boxes."""
    dims: list[list[Interval]] = []
    for extent, cut in zip(shape, cuts, strict=False):
        bounds = sorted({0, extent, *(percent * extent // 100 for percent in cut)})
        dims.append([Interval(a, b) for a, b in pairwise(bounds)])
    return list(product(*dims))


def at(box: Box) -> tuple[Any, ...]:
    return (..., *(slice(*interval) for interval in box))


def check_close(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    if found is None or expected is None:
        assert found is expected, what
        return
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, not {tuple(expected.shape)}"
    wrong = (found - expected).abs().max().item() if found.numel() else 0.0
    assert wrong <= TOLERANCE * max(1e-300, expected.abs().max().item()), f"{what} is wrong by {wrong}"


def check_tile_law(case: Case, cuts: tuple[Cut, ...]) -> None:
    """Outputs, gradients, and windows: tiles against plain torch, in float64."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = case.image(draw).requires_grad_()
    parameters = {k: draw(*s).requires_grad_() for k, s in case.parameters.items() if s is not None}
    try:
        expected = case.plain(x, **parameters)
    except (RuntimeError, ValueError):  # `test_what_torch_refuses` has those
        assume(False)
        return

    rule = case.rule(**parameters)
    outs = tuple(expected.shape[expected.ndim - case.n :])
    assert tuple(r.extent for r in rule.dims) == case.extents
    assert tuple(r.out_extent for r in rule.dims) == outs

    learned = [x, *parameters.values()]
    cotangent = draw(*expected.shape)
    gradients = torch.autograd.grad(expected, learned, cotangent, allow_unused=True)
    found = torch.full_like(expected, float("nan"))
    for box in tiles(outs, cuts):
        part = tile(x, rule, box)
        assert part.shape[part.ndim - case.n :] == tuple(i.size for i in box)
        found[at(box)] = part.detach()
        part.backward(cotangent[at(box)])
        check_window(case, x.detach(), rule, box, parameters, part.detach())
    check_close(found, expected.detach(), "the output")
    for name, leaf, gradient in zip(("x", *parameters), learned, gradients, strict=True):
        check_close(leaf.grad, gradient, f"the gradient of {name}")


def check_window(case: Case, x: Tensor, rule: Windowed, box: Box, parameters: dict[str, Tensor], part: Tensor) -> None:
    """A tile depends on its window alone, in the rule and in torch: all the rest is not a number."""
    windows = [r.reads(o) for r, o in zip(rule.dims, box, strict=True)]
    for window, extent in zip(windows, case.extents, strict=True):
        bounds = [b for interval in window for b in interval]
        assert bounds == sorted(bounds), "not disjoint and ascending"
        assert bounds[0] >= 0 and bounds[-1] <= extent, "outside the image"  # noqa: PT018
    poisoned = torch.full_like(x, float("nan"))
    for window in product(*windows):
        poisoned[at(window)] = x[at(window)]
    with torch.no_grad():
        assert tile(poisoned, rule, box).equal(part), "the rule reads more than its window"
        check_close(case.plain(poisoned, **parameters)[at(box)], part, "torch's output from the window")


# --- what is drawn ------------------------------------------------------------------------------------------

cuts_of_dims = st.tuples(*[st.lists(st.integers(0, 100), max_size=3).map(tuple)] * 3)


def law(cases: Drawn[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test of the law on those cases."""
    return given(case=cases, cuts=cuts_of_dims)


THIRDS: tuple[Cut, ...] = ((33, 66),) * 3

LARGEST = {1: 19, 2: 11, 3: 6}


def extents_of(n: int, smallest: int = 1) -> Drawn[Ints]:
    return st.tuples(*[st.integers(smallest, LARGEST[n])] * n)


def per_dim(n: int, low: int, high: int) -> Drawn[Any]:
    """A number for each dim, or one for all."""
    return st.one_of(st.integers(low, high), st.tuples(*[st.integers(low, high)] * n))


# --- convolution ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conv(Case):
    kernel: Ints
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    bias: bool = True
    batched: bool = True
    transposed: bool = False
    output_padding: Any = 0

    @property
    def parameters(self) -> dict[str, Ints | None]:
        channels = (2 * self.groups, 3) if self.transposed else (3 * self.groups, 2)
        return {"weight": (*channels, *self.kernel), "bias": (3 * self.groups,) if self.bias else None}

    @property
    def arguments(self) -> tuple[Any, ...]:
        if self.transposed:
            return self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return self.stride, self.padding, self.dilation, self.groups

    @property
    def lead(self) -> Ints:
        return (*(2,) * self.batched, 2 * self.groups)

    def plain(self, x: Tensor, **parameters: Tensor) -> Tensor:
        function = getattr(F, f"conv_transpose{self.n}d" if self.transposed else f"conv{self.n}d")
        return function(x, parameters["weight"], parameters.get("bias"), *self.arguments)

    def rule(self, **parameters: Tensor) -> Windowed:
        rule = transposed_rule if self.transposed else conv_rule
        return rule(self.extents, parameters["weight"], parameters.get("bias"), *self.arguments)


@st.composite
def convs(draw: st.DrawFn, n: int) -> Conv:
    return Conv(
        draw(extents_of(n)),
        kernel=draw(st.tuples(*[st.integers(1, 5 - n // 2)] * n)),
        stride=draw(per_dim(n, 1, 6 - n)),
        padding=draw(per_dim(n, 0, 3)),
        dilation=draw(per_dim(n, 1, 3)),
        groups=draw(st.integers(1, 2)),
        bias=draw(st.booleans()),
        batched=draw(st.booleans()),
    )


@st.composite
def named_paddings(draw: st.DrawFn, n: int) -> Conv:
    padding = draw(st.sampled_from(["same", "valid"]))
    stride = 1 if padding == "same" else draw(per_dim(n, 1, 3))
    return replace(draw(convs(n)), padding=padding, stride=stride)


@st.composite
def transposed_convs(draw: st.DrawFn, n: int) -> Conv:
    case = draw(convs(n))
    limits = [max(s, d) for s, d in zip(each(case.stride, n), each(case.dilation, n), strict=True)]
    more = tuple(draw(st.integers(0, limit - 1)) for limit in limits)
    return replace(case, transposed=True, output_padding=more)


@pytest.mark.parametrize("n", [1, 2, 3])
@given(data=st.data(), cuts=cuts_of_dims)
def test_conv(n: int, data: st.DataObject, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(data.draw(convs(n)), cuts)


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@law(st.integers(1, 3).flatmap(named_paddings))
@example(Conv((9,), kernel=(4,), padding="same", dilation=3), THIRDS)
@example(Conv((1, 2), kernel=(4, 2), padding="same"), THIRDS)
def test_conv_with_named_padding(case: Conv, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


@pytest.mark.parametrize(
    ("case", "cuts"),
    [
        (Conv((7,), kernel=(2,), stride=5), THIRDS),
        (Conv((1,), kernel=(1,), stride=2, padding=3), ((15, 30, 80),)),
        (Conv((2, 3), kernel=(1, 2), stride=(1, 3), padding=3), THIRDS),
    ],
)
def test_conv_whose_windows_leave_gaps_or_the_image(case: Conv, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


@pytest.mark.parametrize("n", [1, 2, 3])
@given(data=st.data(), cuts=cuts_of_dims)
def test_transposed_conv(n: int, data: st.DataObject, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(data.draw(transposed_convs(n)), cuts)


@pytest.mark.parametrize(
    ("case", "cuts"),
    [
        (Conv((3,), kernel=(2,), stride=5, transposed=True, output_padding=4), ((30, 40, 90),)),
        (Conv((2,), kernel=(1,), dilation=2, transposed=True, output_padding=1), ((67,),)),
        (Conv((2, 3), kernel=(2, 3), stride=(4, 1), dilation=(1, 3), transposed=True, output_padding=(3, 2)), THIRDS),
    ],
)
def test_transposed_conv_with_outputs_that_no_input_reaches(case: Conv, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


# --- pooling --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool(Case):
    """A pool; its image holds few distinct values where `ties` is set, so that equal values compete."""

    kind: str
    arguments: tuple[Any, ...]
    batched: bool = True
    ties: bool = False

    RULES: ClassVar[dict[str, Callable[..., Windowed]]] = {
        "max_pool": max_pool_rule,
        "avg_pool": avg_pool_rule,
        "adaptive_avg_pool": lambda extents, sizes: adaptive_rule(extents, sizes, False),
        "adaptive_max_pool": lambda extents, sizes: adaptive_rule(extents, sizes, True),
    }

    @property
    def lead(self) -> Ints:
        return (*(2,) * self.batched, 3)

    def image(self, draw: Callable[..., Tensor]) -> Tensor:
        x = super().image(draw)
        return x.round().clamp(-1, 1) if self.ties else x

    def plain(self, x: Tensor, **parameters: Tensor) -> Tensor:
        return getattr(F, f"{self.kind}{self.n}d")(x, *self.arguments)

    def rule(self, **parameters: Tensor) -> Windowed:
        return self.RULES[self.kind](self.extents, *self.arguments)


@st.composite
def max_pools(draw: st.DrawFn, n: int) -> Pool:
    extents, kernel = draw(extents_of(n)), draw(st.tuples(*[st.integers(1, 4)] * n))
    stride = draw(st.none() | per_dim(n, 1, 5))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    dilation = draw(st.tuples(*[st.integers(1, 3)] * n))
    # A dilated window may step over the whole image: its maximum is −∞, and torch's gradient is then not defined.
    strides = each(kernel if stride is None else stride, n)
    for e, k, s, p, d in zip(extents, kernel, strides, padding, dilation, strict=True):
        windows = (range(start, start + d * k, d) for start in range(-p, e, s))
        assume(all(any(0 <= i < e for i in window) for window in windows))
    arguments = (kernel, stride, padding, dilation, draw(st.booleans()))
    return Pool(extents, "max_pool", arguments, draw(st.booleans()), draw(st.booleans()))


@st.composite
def avg_pools(draw: st.DrawFn, n: int) -> Pool:
    kernel = draw(st.tuples(*[st.integers(1, 4)] * n))
    stride = draw(st.none() | per_dim(n, 1, 5))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    more = (draw(st.none() | st.sampled_from([1, 3, 7])),) if n > 1 else ()
    arguments = (kernel, stride, padding, draw(st.booleans()), draw(st.booleans()), *more)
    return Pool(draw(extents_of(n)), "avg_pool", arguments, draw(st.booleans()))


@st.composite
def adaptive_pools(draw: st.DrawFn, n: int) -> Pool:
    extents = draw(extents_of(n))
    sizes = draw(st.one_of(extents_of(n), st.tuples(*(st.sampled_from([1, e, max(1, e // 2)]) for e in extents))))
    kind = draw(st.sampled_from(["adaptive_avg_pool", "adaptive_max_pool"]))
    return Pool(extents, kind, (sizes,), draw(st.booleans()), draw(st.booleans()))


@law(st.integers(1, 3).flatmap(max_pools))
@example(Pool((10,), "max_pool", (3, 2, 1, 1, True)), THIRDS)
@example(Pool((7, 5), "max_pool", ((2, 3), None, 1, 2, True), ties=True), THIRDS)
def test_max_pool(case: Pool, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


@law(st.integers(1, 3).flatmap(avg_pools))
@example(Pool((7,), "avg_pool", (2, 2, 1, True, True)), THIRDS)
@example(Pool((7, 6), "avg_pool", (3, 2, 1, True, False, None)), THIRDS)
@example(Pool((7, 6), "avg_pool", (3, 2, 1, True, False, 5)), THIRDS)
def test_avg_pool(case: Pool, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


@law(st.integers(1, 3).flatmap(adaptive_pools))
@example(Pool((7, 5), "adaptive_max_pool", ((3, 9),), ties=True), THIRDS)
@example(Pool((8, 6), "adaptive_max_pool", ((4, 2),), ties=True), THIRDS)
@example(Pool((8, 6), "adaptive_avg_pool", ((4, 5),)), THIRDS)
def test_adaptive_pool(case: Pool, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


# --- padding and rolling ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pad(Case):
    """Amounts are (before, after) for each dim, the first dim first."""

    amounts: tuple[tuple[int, int], ...]
    mode: str = "constant"
    value: float = 0.0

    REMAPS: ClassVar[dict[str, Callable[[int, int, int], Remap]]] = {
        "reflect": Remap.reflect,
        "replicate": Remap.replicate,
        "circular": Remap.circular,
    }

    def plain(self, x: Tensor, **parameters: Tensor) -> Tensor:
        flat = [amount for pair in reversed(self.amounts) for amount in pair]
        return F.pad(x, flat, self.mode, self.value if self.mode == "constant" else None)

    def rule(self, **parameters: Tensor) -> Windowed:
        if self.mode == "constant":
            return constant_rule(self.extents, self.amounts, self.value)
        remap = self.REMAPS[self.mode]
        dims = (
            remap(e, a, b) if a or b else Window(e, e) for e, (a, b) in zip(self.extents, self.amounts, strict=True)
        )
        return remap_rule(self.mode, tuple(dims))


@dataclass(frozen=True)
class Roll(Case):
    shifts: Ints

    def plain(self, x: Tensor, **parameters: Tensor) -> Tensor:
        return x.roll(self.shifts, tuple(range(-self.n, 0)))

    def rule(self, **parameters: Tensor) -> Windowed:
        dims = (Remap.roll(e, s) if s % e else Window(e, e) for e, s in zip(self.extents, self.shifts, strict=True))
        return remap_rule("roll", tuple(dims))


@st.composite
def constant_pads(draw: st.DrawFn, n: int) -> Pad:
    extents = draw(extents_of(n))
    amounts = draw(st.tuples(*[st.tuples(st.integers(-4, 5), st.integers(-4, 5))] * n))
    assume(all(e + a + b >= 1 for e, (a, b) in zip(extents, amounts, strict=True)))
    return Pad(extents, amounts, value=draw(st.sampled_from([0.0, -2.5])))


@st.composite
def mirrored_pads(draw: st.DrawFn, n: int) -> Pad:
    mode, extents = draw(st.sampled_from(sorted(Pad.REMAPS))), draw(extents_of(n))
    limits = [{"reflect": e - 1, "circular": e, "replicate": e + 3}[mode] for e in extents]
    amounts = tuple((draw(st.integers(0, limit)), draw(st.integers(0, limit))) for limit in limits)
    return Pad(extents, amounts, mode)


@st.composite
def rolls(draw: st.DrawFn, n: int) -> Roll:
    return Roll(draw(extents_of(n)), draw(st.tuples(*[st.integers(-25, 25)] * n)))


@law(st.integers(1, 3).flatmap(constant_pads))
@example(Pad((5,), ((-2, 4),)), THIRDS)
@example(Pad((2,), ((-2, 4),), value=1.5), THIRDS)
def test_constant_pad(case: Pad, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


@law(st.integers(1, 3).flatmap(mirrored_pads))
@example(Pad((5, 3), ((4, 4), (0, 0)), "reflect"), THIRDS)
@example(Pad((5, 3), ((5, 5), (0, 3)), "circular"), THIRDS)
@example(Pad((1, 3), ((4, 0), (0, 2)), "replicate"), THIRDS)
def test_mirrored_pad(case: Pad, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


@law(st.integers(1, 3).flatmap(rolls))
def test_roll(case: Roll, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


# --- resampling ---------------------------------------------------------------------------------------------------

MODES = {
    1: ("nearest", "nearest-exact", "linear"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic"),
    3: ("nearest", "nearest-exact", "trilinear"),
}


@dataclass(frozen=True)
class Resample(Case):
    mode: str
    size: Any = None
    factor: Any = None
    align: bool | None = None
    recompute: bool | None = None

    def plain(self, x: Tensor, **parameters: Tensor) -> Tensor:
        return F.interpolate(x, self.size, self.factor, self.mode, self.align, self.recompute)

    def rule(self, **parameters: Tensor) -> Windowed:
        outs, scales = target_sizes(self.extents, self.size, self.factor, self.recompute)
        if self.align:
            scales = [(e - 1) / (o - 1) if o > 1 else 0.0 for e, o in zip(self.extents, outs, strict=True)]
        dims = zip(self.extents, outs, scales, strict=True)
        return interpolate_rule(self.extents, tuple(Taps(e, o, self.mode, bool(self.align), s) for e, o, s in dims))


@dataclass(frozen=True)
class Shuffle(Case):
    factor: int
    up: bool

    @property
    def lead(self) -> Ints:
        return (2, 2 * self.factor**2) if self.up else (2, 3)

    def plain(self, x: Tensor, **parameters: Tensor) -> Tensor:
        return F.pixel_shuffle(x, self.factor) if self.up else F.pixel_unshuffle(x, self.factor)

    def rule(self, **parameters: Tensor) -> Windowed:
        return (shuffle_rule if self.up else unshuffle_rule)(self.extents, self.factor)


factors = st.one_of(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0]), st.floats(0.3, 4.0), st.integers(1, 5).map(float))


def agrees_with_itself(case: Resample) -> bool:
    """Whether torch's gradient is that of its output, which is linear in x: c · f(x) = f'(c) · x.

    It is not where a factor like 1.25 or 2.25 leaves the extent 2 as it is or doubles it: torch's nearest and cubic
    gradients then take the factor for 1 or 2, and its outputs do not. There is nothing to be equal to.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 1, *case.extents, generator=generator, dtype=torch.float64, requires_grad=True)
    y = case.plain(x)
    c = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(y, x, c)
    return torch.allclose((c * y).sum(), (gradient * x).sum(), rtol=1e-8, atol=1e-8)


@st.composite
def resamples(draw: st.DrawFn, n: int) -> Resample:
    extents, mode = draw(extents_of(n)), draw(st.sampled_from(MODES[n]))
    align = None if "nearest" in mode else draw(st.booleans())
    if draw(st.booleans()):
        return Resample(extents, mode, size=draw(st.one_of(st.integers(1, 14), extents_of(n))), align=align)
    factor = draw(st.one_of(factors, st.tuples(*[factors] * n)))
    factors_by_dim = factor if isinstance(factor, tuple) else (factor,) * n
    assume(all(int(e * f) for e, f in zip(extents, factors_by_dim, strict=True)))
    case = Resample(extents, mode, factor=factor, align=align, recompute=draw(st.none() | st.booleans()))
    assume(agrees_with_itself(case))
    return case


@st.composite
def shuffles(draw: st.DrawFn) -> Shuffle:
    factor, up, extents = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.tuples(*[st.integers(1, 6)] * 2))
    return Shuffle(extents if up else tuple(e * factor for e in extents), factor, up)


@pytest.mark.parametrize("n", [1, 2, 3])
@given(data=st.data(), cuts=cuts_of_dims)
def test_interpolate(n: int, data: st.DataObject, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(data.draw(resamples(n)), cuts)


@pytest.mark.parametrize(
    ("case", "cuts"),
    [
        (Resample((5, 7), "bilinear", factor=2.0, align=False), THIRDS),
        (Resample((5, 7), "bilinear", factor=2.0, align=True), THIRDS),
        (Resample((5, 7), "bicubic", factor=3.0, align=False), THIRDS),
        (Resample((11, 4), "bicubic", size=(4, 11), align=True), THIRDS),
        (Resample((13,), "nearest", factor=3.0), THIRDS),
        (Resample((13,), "nearest-exact", size=7), THIRDS),
        (Resample((19,), "linear", factor=0.37, align=False), THIRDS),
        (Resample((5, 3, 4), "trilinear", size=(3, 7, 1), align=True), THIRDS),
        # Factors that leave an extent as it is: torch copies along that dim.
        (Resample((2,), "linear", factor=1.25, align=False), THIRDS),
        (Resample((2, 3), "bilinear", factor=(1.25, 2.0), align=False), THIRDS),
        (Resample((2, 2, 2), "trilinear", factor=1.25, align=False), THIRDS),
    ],
)
def test_interpolate_up_and_down(case: Resample, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


@law(shuffles())
def test_pixel_shuffle(case: Shuffle, cuts: tuple[Cut, ...]) -> None:
    check_tile_law(case, cuts)


# --- what torch refuses ---------------------------------------------------------------------------------------------


@lru_cache
def one_rank(n: int) -> mural.Mesh:
    return mural.init(spatial=(1,) * n)


@pytest.mark.parametrize(
    "case",
    [
        Conv((3,), kernel=(4,)),
        Conv((9, 3), kernel=(3, 2), dilation=(1, 3)),
        Conv((9,), kernel=(3,), stride=2, padding="same"),
        Conv((9,), kernel=(3,), padding="full"),
        Conv((4,), kernel=(3,), stride=2, transposed=True, output_padding=2),
        Conv((1,), kernel=(1,), padding=1, transposed=True),
        Conv((1,), kernel=(2,), padding=1, transposed=True),
        Conv((2, 3), kernel=(1, 1), padding=(1, 0), transposed=True),
        Pool((3,), "max_pool", (4, 1)),
        Pool((3,), "avg_pool", (4, 1)),
        Pool((9,), "max_pool", (3, 1, 2)),
        Pool((9,), "avg_pool", (3, 1, 2)),
        Pool((4, 4), "max_pool", ((2, 5), 1)),
        Pool((4, 4), "avg_pool", ((2, 5), 1)),
        Pool((4, 4), "avg_pool", (2, 1, 0, False, True, 0)),
        Pool((1, 1, 1), "avg_pool", ((1, 1, 2), None, 0, True)),
        Pad((4,), ((-3, -2),)),
        Pad((2,), ((-3, 4),)),
        Pad((2,), ((4, -3),)),
        Pad((4,), ((4, 0),), "reflect"),
        Pad((4,), ((0, 5),), "circular"),
        Pad((4,), ((1, 1),), "mirror"),
        Resample((4,), "nearest", factor=0.2),
        Resample((4,), "nearest", size=0),
        Resample((4,), "nearest", size=3, factor=2.0),
        Resample((4,), "nearest"),
        Resample((4,), "nearest", size=3, align=True),
        Resample((4,), "bilinear", size=3),
        Resample((4, 4, 4), "bicubic", size=3),
        Shuffle((4, 5), 2, up=False),
    ],
    ids=repr,
)
def test_what_torch_refuses(case: Case) -> None:
    """An operation that plain torch refuses is refused on a sharded image too, and not answered."""
    x = torch.zeros(*case.lead, *case.extents, dtype=torch.float64)
    parameters = {k: torch.zeros(s, dtype=torch.float64) for k, s in case.parameters.items() if s is not None}
    refusals = (RuntimeError, ValueError, NotImplementedError)
    with pytest.raises(refusals):
        case.plain(x, **parameters)
    with pytest.raises(refusals):
        case.plain(mural.shard(x, one_rank(case.n)), **parameters)
