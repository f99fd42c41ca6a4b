"""Windows name the inputs that an operation reads: against every kernel tap written out, and against torch."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from mural.geometry import Interval, Remap, Window
from mural.geometry.window import Segment

extents = st.integers(1, 19)
kernels = st.integers(1, 5)
strides = st.integers(1, 6)
paddings = st.integers(0, 5)
dilations = st.integers(1, 3)

Taps = Callable[[int], set[int]]
"""The input positions, border included, that an output reads, in a range that holds all of them."""

EVERY = range(-40, 240)


@st.composite
def conv_windows(draw: st.DrawFn) -> tuple[Window, Taps]:
    extent, kernel, stride, padding, dilation = (draw(s) for s in (extents, kernels, strides, paddings, dilations))
    window = Window.conv(extent, kernel, stride, padding, dilation)
    assume(window.out_extent >= 1)
    return window, lambda o: {o * stride - padding + dilation * t for t in range(kernel)}


@st.composite
def transposed_windows(draw: st.DrawFn, dilation: st.SearchStrategy[int] = dilations) -> tuple[Window, Taps]:
    extent, kernel, stride, padding, d = (draw(s) for s in (extents, kernels, strides, paddings, dilation))
    more = draw(st.integers(0, max(stride, d) - 1))
    window = Window.transposed(extent, kernel, stride, padding, more, d)
    assume(window.out_extent >= 1)
    return window, lambda o: {i for i in EVERY if any(i * stride - padding + d * t == o for t in range(kernel))}


@st.composite
def adaptive_windows(draw: st.DrawFn) -> tuple[Window, Taps]:
    extent, out = draw(extents), draw(extents)
    # ceil((o + 1)·extent / out), without floats
    return Window.adaptive(extent, out), lambda o: set(range(o * extent // out, -(-(o + 1) * extent // out)))


@st.composite
def shifted_windows(draw: st.DrawFn) -> tuple[Window, Taps]:
    by = draw(st.integers(-6, 6))
    return Window.shifted(draw(extents), draw(extents), by), lambda o: {o + by}


dense_windows = st.one_of(conv_windows(), transposed_windows(st.just(1)), adaptive_windows(), shifted_windows())
"""Windows whose taps have both ends of every span among them."""
all_windows = st.one_of(dense_windows, transposed_windows())


def draw_outputs(data: st.DataObject, extent: int) -> Interval:
    start = data.draw(st.integers(0, extent - 1))
    return Interval(start, data.draw(st.integers(start + 1, extent)))


# --- what is read -------------------------------------------------------------------------------------------


@given(st.data(), dense_windows)
def test_span_is_the_hull_of_the_taps(data: st.DataObject, case: tuple[Window, Taps]) -> None:
    window, taps = case
    out = draw_outputs(data, window.out_extent)
    read = set[int]().union(*(taps(o) for o in range(*out)))
    span = window.span(out)
    if read:
        assert span == Interval(min(read), max(read) + 1)
    else:
        assert span.size == 0


@given(st.data(), all_windows)
def test_reads_are_every_tap_in_the_image_and_nothing_outside_the_span(
    data: st.DataObject, case: tuple[Window, Taps]
) -> None:
    window, taps = case
    out = draw_outputs(data, window.out_extent)
    read = set[int]().union(*(taps(o) for o in range(*out))) & set(range(window.extent))
    (found,) = window.reads(out)
    assert read <= set(range(*found)) <= set(range(*window.span(out))) & set(range(window.extent))
    assert 0 <= found.start <= found.stop <= window.extent


@given(all_windows, st.integers(0, 9))
def test_no_outputs_read_nothing(case: tuple[Window, Taps], at: int) -> None:
    window, _ = case
    assert window.span(Interval(at, at)) == Interval(0, 0)
    assert window.reads(Interval(at, at)) == (Interval(0, 0),)
    assert window.touching(Interval(at, at)) == Interval(0, 0)


@pytest.mark.parametrize(("by", "out", "found"), [
    (-4, Interval(0, 4), Interval(0, 0)), (-4, Interval(0, 5), Interval(0, 1)), (-4, Interval(3, 4), Interval(0, 0)),
    (6, Interval(0, 2), Interval(0, 0)), (5, Interval(0, 2), Interval(5, 6)), (6, Interval(1, 3), Interval(0, 0)),
])  # fmt: skip
def test_outputs_beside_the_image_read_nothing(by: int, out: Interval, found: Interval) -> None:
    assert Window.shifted(6, 9, by).reads(out) == (found,)


@given(all_windows, st.integers(-8, 20), st.integers(1, 12))
def test_touching_are_the_outputs_that_read_an_input(case: tuple[Window, Taps], start: int, size: int) -> None:
    window, taps = case
    inputs, each = Interval(start, start + size), range(-60, 160)
    touching = window.touching(inputs)
    reading = [o for o in each if taps(o) & set(range(*inputs))]
    meeting = [o for o in each if (window.span(Interval(o, o + 1)) & inputs).size]
    assert set(reading) <= set(meeting) <= set(range(*touching))
    if all(window.span(Interval(o, o + 1)).size for o in each):
        assert meeting == [o for o in each if touching.start <= o < touching.stop]


# --- the extents that torch gives ------------------------------------------------------------------------------


@given(extents, kernels, strides, paddings, dilations)
def test_conv_has_torchs_extent(extent: int, kernel: int, stride: int, padding: int, dilation: int) -> None:
    window = Window.conv(extent, kernel, stride, padding, dilation)
    assume(window.out_extent >= 1)
    y = F.conv1d(torch.ones(1, 1, extent), torch.ones(1, 1, kernel), None, stride, padding, dilation)
    assert window.out_extent == y.shape[-1]


@given(extents, kernels, strides, paddings, st.integers(0, 5), dilations)
def test_transposed_has_torchs_extent(
    extent: int, kernel: int, stride: int, padding: int, more: int, dilation: int
) -> None:
    window = Window.transposed(extent, kernel, stride, padding, more, dilation)
    assume(window.out_extent >= 1 and more < max(stride, dilation))
    y = F.conv_transpose1d(torch.ones(1, 1, extent), torch.ones(1, 1, kernel), None, stride, padding, more, 1, dilation)
    assert window.out_extent == y.shape[-1]


# --- one input per output --------------------------------------------------------------------------------------

REMAPS = {"reflect": Remap.reflect, "replicate": Remap.replicate, "circular": Remap.circular}


def check_remap(remap: Remap, expected: list[int], data: st.DataObject) -> None:
    assert remap.out_extent == len(expected)
    assert [remap.index(o) for o in range(len(expected))] == expected
    out = draw_outputs(data, len(expected))
    found = remap.reads(out)
    assert {i for interval in found for i in range(*interval)} == {expected[o] for o in range(*out)}
    assert all(a.stop < b.start for a, b in pairwise(found)), "neither merged nor ascending"
    assert all(interval.size for interval in found)
    assert remap.reads(Interval(out.start, out.start)) == (Interval(0, 0),)
    assert all(s.reads(Interval(s.out.stop, s.out.stop + 3)) == Interval(0, 0) for s in remap.segments)


@pytest.mark.parametrize("mode", REMAPS)
@given(data=st.data(), extent=extents)
def test_padding_reads_what_torch_reads(mode: str, data: st.DataObject, extent: int) -> None:
    limit = {"reflect": extent - 1, "circular": extent, "replicate": extent + 7}[mode]
    before, after = data.draw(st.integers(0, limit)), data.draw(st.integers(0, limit))
    expected = F.pad(torch.arange(extent, dtype=torch.float64).view(1, 1, -1), (before, after), mode=mode)
    check_remap(REMAPS[mode](extent, before, after), expected.flatten().long().tolist(), data)


@given(st.data(), extents, st.integers(-40, 40))
def test_roll_reads_what_torch_reads(data: st.DataObject, extent: int, shift: int) -> None:
    check_remap(Remap.roll(extent, shift), torch.arange(extent).roll(shift).tolist(), data)


@pytest.mark.parametrize(("firsts", "expected"), [
    ((0, 5, 7), ((0, 2), (5, 9))),
    ((7, 5, 0), ((0, 2), (5, 9))),
    ((0, 2, 4), ((0, 6),)),
    ((4, 4, 8), ((4, 6), (8, 10))),
    ((1, 5, 6), ((1, 3), (5, 8))),
])  # fmt: skip
def test_pieces_that_touch_are_merged(firsts: tuple[int, ...], expected: tuple[tuple[int, int], ...]) -> None:
    segments = tuple(Segment(Interval(2 * k, 2 * k + 2), first, 1) for k, first in enumerate(firsts))
    assert Remap(12, segments).reads(Interval(0, 6)) == tuple(Interval(*pair) for pair in expected)


def test_a_longer_piece_is_not_cut_short_by_one_inside_it() -> None:
    segments = (Segment(Interval(0, 6), 3, 1), Segment(Interval(6, 8), 4, 1))
    assert Remap(12, segments).reads(Interval(0, 8)) == (Interval(3, 9),)
    segments = (Segment(Interval(0, 2), 0, 1), Segment(Interval(2, 8), 5, 1), Segment(Interval(8, 10), 6, 1))
    assert Remap(12, segments).reads(Interval(0, 10)) == (Interval(0, 2), Interval(5, 11))
