"""Augmenting a piece gives what augmenting the whole image and cutting it would: turns, intensities and noise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mural.data.loading.augment import Augment, Drawn, raise_to
from mural.data.loading.turned_view import QuarterTurns, View
from mural.errors import DataError
from mural.geometry import Box, Interval, volume
from mural.geometry.tile_grid import split


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box inside a shape, empty ones too."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple(Interval(a, b) for a, b in ends)


@st.composite
def turns(draw: st.DrawFn, ndim: int) -> tuple[QuarterTurns, list[tuple[str, tuple[int, ...], int]]]:
    """A turn, and the calls of torch that do the same."""
    turn, calls = QuarterTurns.none(ndim), []
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            dims = tuple(sorted(draw(st.sets(st.integers(0, ndim - 1), min_size=1))))
            turn = turn.then(QuarterTurns.flip(ndim, dims))
            calls.append(("flip", dims, 0))
        else:
            plane = tuple(draw(st.permutations(range(ndim)))[:2])
            quarters = draw(st.integers(0, 3))
            turn = turn.then(QuarterTurns.rotation(ndim, quarters, plane))
            calls.append(("rot90", plane, quarters))
    return turn, calls


@st.composite
def views(draw: st.DrawFn) -> tuple[View, torch.Tensor, torch.Tensor, Box]:
    """A view of an image, that image, what torch makes of it as a whole, and a box of the result."""
    extents = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    window = tuple(Interval(a := draw(st.integers(-3, n)), a + draw(st.integers(1, 9))) for n in extents)
    turn, calls = draw(turns(len(extents)))
    image = torch.arange(2 * torch.Size(extents).numel()).view(2, *extents) + 1
    padded = torch.zeros(2, *(n + 40 for n in extents), dtype=image.dtype)
    padded[(slice(None), *(slice(20, 20 + n) for n in extents))] = image
    whole = padded[(slice(None), *(slice(20 + i.start, 20 + i.stop) for i in window))]
    for name, dims, quarters in calls:
        lead = [d + 1 for d in dims]
        whole = whole.flip(lead) if name == "flip" else whole.rot90(quarters, lead)
    view = View(extents, window, turn)
    return view, image, whole, draw(boxes(view.shape))


@given(views())
def test_a_box_of_a_view_is_the_box_behind_it_turned(case: tuple[View, torch.Tensor, torch.Tensor, Box]) -> None:
    view, image, whole, box = case
    assert view.shape == tuple(whole.shape[1:])
    behind = view.behind(box)
    padded = torch.zeros(2, *(n + 40 for n in view.extents), dtype=image.dtype)
    padded[(slice(None), *(slice(20, 20 + n) for n in view.extents))] = image
    piece = view.turn.apply(padded[(slice(None), *(slice(20 + i.start, 20 + i.stop) for i in behind))])
    assert torch.equal(piece, whole[(slice(None), *(slice(*i) for i in box))])
    assert view.before(behind) == box


@given(st.data())
def test_parts_of_a_box_tile_it_and_share_no_file_tile(data: st.DataObject) -> None:
    chunks = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    starts = [data.draw(st.integers(-10, 30)) for _ in chunks]
    box = tuple(Interval(a, a + data.draw(st.integers(1, 40))) for a in starts)
    parts = split(box, chunks, data.draw(st.integers(1, 6)), data.draw(st.sampled_from((5, 100, 10**6))))
    assert sum(map(volume, parts)) == volume(box)
    assert all(o.contains(i) for part in parts for o, i in zip(box, part, strict=True))
    for part in parts:
        for i, outer, chunk in zip(part, box, chunks, strict=True):
            assert i.start == outer.start or i.start % chunk == 0
            assert i.stop == outer.stop or i.stop % chunk == 0


EVERYTHING = Augment(brightness=0.2, contrast=0.3, gamma=0.4, channel_scale=0.2, channel_shift=0.1, noise=0.05)


@given(st.data())
def test_recolouring_a_piece_gives_the_bits_of_the_whole(data: st.DataObject) -> None:
    shape = (2, *data.draw(st.lists(st.integers(1, 60), min_size=2, max_size=3)))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64)))
    drawn = EVERYTHING.draw(data.draw(st.integers(0, 99)), 3, 5, 2, shape[1:])
    image = torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(1)) - 0.1
    whole = image.clone()
    drawn.recolour(whole, tuple(Interval(0, n) for n in shape), shape)
    box = (Interval(0, 2), *data.draw(boxes(shape[1:])))
    at = tuple(slice(*i) for i in box)
    piece = image[at].clone()
    drawn.recolour(piece, box, shape)
    assert torch.equal(piece, whole[at])


def test_recolouring_is_what_the_formula_says() -> None:
    drawn = Drawn(QuarterTurns.none(2), 1.7, (2.0, 0.5), (0.1, -0.2), 0.0, 0)
    image = torch.rand(2, 40, 50, dtype=torch.float64) - 0.3
    got = image.clone()
    drawn.recolour(got, (Interval(0, 2), Interval(0, 40), Interval(0, 50)), (2, 40, 50))
    curve = image.sign() * image.abs() ** 1.7
    gain, offset = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in ((2.0, 0.5), (0.1, -0.2)))
    expected = curve * gain + offset
    assert torch.allclose(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("power", [0.5, 1.3])
def test_a_power_has_the_same_bits_wherever_a_value_lies(power: float) -> None:
    """In torch, vector registers and the last few values use different functions, which may differ in the last bit."""
    values = torch.rand(70_001, generator=torch.Generator().manual_seed(0))
    whole = values.clone()
    raise_to(whole, power)
    for start in range(1, 20):
        piece = values[start : start + 33_333].clone()
        raise_to(piece, power)
        assert torch.equal(piece, whole[start : start + 33_333])


def test_noise_is_normal_with_the_drawn_deviation() -> None:
    drawn = Drawn(QuarterTurns.none(2), 1.0, (1.0,), (0.0,), 0.5, 7)
    image = torch.zeros(1, 500, 500, dtype=torch.float64)
    drawn.recolour(image, (Interval(0, 1), Interval(0, 500), Interval(0, 500)), (1, 500, 500))
    assert abs(image.mean()) < 0.01
    assert abs(image.std() - 0.5) < 0.01


def test_each_kind_of_change_has_draws_of_its_own() -> None:
    """Switching noise on must not change the flips, nor must torch's own generator be moved."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    plain = [Augment().draw(0, 1, i, 3, (8, 8)).turn for i in range(40)]
    noisy = [EVERYTHING.draw(0, 1, i, 3, (8, 8)).turn for i in range(40)]
    assert plain == noisy
    assert torch.equal(before, torch.get_rng_state())
    assert len(set(plain)) == 8  # the turns of a square
    assert [Augment().draw(0, 2, i, 3, (8, 8)).turn for i in range(40)] != plain


def test_strengths_bound_what_is_drawn() -> None:
    draws = [EVERYTHING.draw(0, 0, i, 2, (8, 8)) for i in range(200)]
    assert 0.67 < min(d.gamma for d in draws) < 0.75
    assert 1.35 < max(d.gamma for d in draws) < 1.5
    assert min(min(d.gain) for d in draws) > 0.7 * 0.8
    assert max(max(d.gain) for d in draws) < 1.3 * 1.2
    assert 0.04 < max(d.noise for d in draws) < 0.05
    assert all(d.gain[0] != d.gain[1] for d in draws)


def test_quarter_turns_spare_images_whose_sides_differ() -> None:
    sides = {Augment(flips=False).draw_turn(0, 0, i, (6, 9)).dims for i in range(30)}
    assert sides == {(0, 1)}
    swapped = {Augment(flips=False, swap=True).draw_turn(0, 0, i, (6, 9)).dims for i in range(30)}
    assert swapped == {(0, 1), (1, 0)}


def test_volumes_turn_in_plane_unless_dims_say_otherwise() -> None:
    found = [Augment().draw_turn(0, 0, i, (5, 8, 8)) for i in range(60)]
    assert {(t.dims[0], t.flips[0]) for t in found} == {(0, False)}
    cube = [Augment(dims=(0, 1, 2)).draw_turn(0, 0, i, (8, 8, 8)) for i in range(200)]
    assert len({t.dims for t in cube}) == 4  # none, and one exchange for each plane
    assert len({t.dims[0] for t in cube}) == 3


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DataError, match="noise=-1"):
        Augment(noise=-1)
    with pytest.raises(DataError, match="different spatial dims"):
        Augment(dims=(1, 1))
    with pytest.raises(DataError, match=r"dims=\(2,\) name a dim that"):
        Augment(dims=(2,)).draw_turn(0, 0, 0, (4, 4))
