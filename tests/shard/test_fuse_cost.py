"""Which layers share an exchange: chains and their cost, as data, without processes."""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod

import pytest

from mural.comm import Transport
from mural.geometry import Cuts, Interval, Window
from mural.ranks import SPATIAL, Mesh
from mural.shard.halo.fuse_cost import Constants, FusedLayer, Layer, alone, first_part, together
from mural.shard.halo.margin import common, covers, hull, own_spans
from mural.shard.halo.window_chain import PATIENCE, Site, levels_after, new_site
from mural.shard.layout import Layout

COSTS = Constants()
LAYER = Layer(flops=1e4, outputs=1000, halo=10_000, exchanges=True)


def layout(shape: tuple[int, int], grid: tuple[int, int] = (2, 1)) -> Layout:
    """An image of two channels on a grid, seen from rank 0."""
    mesh = Mesh((1, 1, 1, 1, *grid, 1), 0, 2, Transport(None, 1.0))
    cuts = tuple(Cuts.even(n, parts) for n, parts in zip(shape, grid, strict=True))
    axes = SPATIAL[:2]
    return Layout(mesh, (1, 2, *shape), (None, None, *axes), (None, None, *cuts), tuple(zip(axes, cuts, strict=True)))


def conv(source: Site | Layout, kernel: int, stride: int = 1, channels: int = 2, also: tuple[Site, ...] = ()) -> Site:
    """A convolution behind a site, as if it had run."""
    have = source.target if isinstance(source, Site) else source
    sources = (source, *also) if isinstance(source, Site) else ()
    dims = tuple(Window.conv(n, kernel, stride, kernel // 2) for n in have.shape[2:])
    target = have.resized({2 + i: w.out_extent for i, w in enumerate(dims)})
    site = new_site(sources, dims, have, target, 2.0 * kernel**2 * channels**2, 4 * channels, True)
    if site is None:
        raise ValueError("no site")
    site.run()
    return site


def rows(spans: tuple[tuple[Interval, ...], ...]) -> list[tuple[int, int]]:
    """The intervals of the ranks along the first spatial dim."""
    return [tuple(i) for i in spans[2]]


def test_composed_windows_of_a_chain() -> None:
    a = conv(layout((16, 16)), 3)
    b = conv(a, 5, 2)
    conv(b, 3)
    assert a.own[2] == (Interval(0, 8), Interval(8, 16))
    # Behind stride 2, rank 0 owns [0, 4). The last convolution reads [0, 5), which reads [0, 11), which reads [0, 12).
    assert [(rows(outs), rows(ins)) for outs, ins in a.depths()] == [
        ([(0, 8), (8, 16)], [(0, 9), (7, 16)]),
        ([(0, 9), (6, 16)], [(0, 10), (5, 16)]),
        ([(0, 11), (4, 16)], [(0, 12), (3, 16)]),
    ]


def test_levels_count_exchanges() -> None:
    a = conv(layout((16, 16)), 3)
    b = conv(a, 1)
    c = conv(b, 3)
    assert levels_after(a) == {a: 0, b: 0, c: 1}


def test_a_sum_with_a_tensor_without_a_margin_ends_the_chain() -> None:
    image = layout((16, 16))
    stem = conv(image, 3)
    a = conv(stem, 3)
    b = conv(a, 3)
    after = conv(b, 3, also=(stem,))  # reads b + stem
    assert levels_after(stem) == {stem: 0, a: 1, b: 2, after: 3}
    assert levels_after(a) == {a: 0, b: 1}  # an exchange at a gives the stem's result no margin


def test_a_margin_is_used_as_far_as_it_reaches() -> None:
    a = conv(layout((32, 32)), 3)
    b = conv(a, 3)
    conv(b, 3)
    (_, own), (_, one), (_, two) = a.depths()
    assert a.within_reach(two) == a.depths()[2]
    assert a.within_reach(one) == a.depths()[1]
    assert a.within_reach(own) == a.depths()[0]
    assert a.within_reach(own_spans(a.have)) is None


def test_what_did_not_follow_lately_is_not_expected() -> None:
    a = conv(layout((16, 16)), 3)
    b = conv(a, 3)
    for runs in range(PATIENCE + 1):
        assert len(a.depths()) == 2, runs
        a.run()
    assert len(a.depths()) == 1
    b.run()
    assert len(a.depths()) == 2


def test_no_site_where_a_rank_has_nothing_or_the_cut_ends() -> None:
    image = layout((16, 16))
    empty = replace(image, cuts=(None, None, Cuts.of((0, 0, 16)), image.cuts[3]))
    dims = tuple(Window.conv(16, 3, 1, 1) for _ in range(2))
    assert new_site((), dims, empty, empty, 1.0, 4, True) is None
    small = tuple(Window.conv(16, 3, 8, 1) for _ in range(2))
    target = image.resized({2: 2, 3: 2})
    assert new_site((), small, image, target, 1.0, 4, True) is None


def test_forced_chains_end_where_a_shard_is_thinner_than_the_halo() -> None:
    a = conv(layout((12, 12)), 3)
    last = a
    for _ in range(7):
        last = conv(last, 3)
    found = a.worth(None)
    assert found is not None
    assert rows(found[1]) == [(0, 12), (0, 12)]  # six rows of six
    b = conv(layout((10, 10)), 3)
    last = b
    for _ in range(7):
        last = conv(last, 3)
    found = b.worth(None)
    assert found is not None
    assert rows(found[1]) == [(0, 10), (0, 10)]


@pytest.mark.parametrize(("size", "channels", "shared"), [(32, 8, True), (64, 16, True), (1024, 16, False)])
def test_small_images_share_exchanges_and_large_ones_do_not(size: int, channels: int, shared: bool) -> None:
    a = conv(layout((size, size)), 3, channels=channels)
    last = a
    for _ in range(5):
        last = conv(last, 3, channels=channels)
    assert (a.worth(COSTS) is not None) == shared


def test_interior_hides_a_message() -> None:
    slow = replace(COSTS, latency=1.0, strips=1.25)
    assert alone(LAYER, COSTS, True) > alone(LAYER, COSTS, False) > 0
    assert alone(replace(LAYER, outputs=10**12), slow, True) == 2 * 0.25
    assert alone(replace(LAYER, outputs=0), slow, False) == pytest.approx(slow.strips + 10_000 / slow.bandwidth)
    assert alone(replace(LAYER, exchanges=False), slow, True) == 0


def test_shared_exchange_pays_its_wait_its_copies_and_what_is_computed_again() -> None:
    def price(**changed: int | Layer) -> float:
        return together([replace(FusedLayer(LAYER, 0, 0, 0), **changed)], COSTS, True)

    base = price()
    assert base == pytest.approx(2 * COSTS.fetch)
    assert together([FusedLayer(LAYER, 0, 0, 0), FusedLayer(LAYER, 0, 0)], COSTS, True) == base
    assert price(halo=10**6) - base == pytest.approx(2 * 10**6 / COSTS.bandwidth)
    assert price(piece=10**6) - base == pytest.approx(4 * 10**6 / COSTS.copying)
    assert price(piece=10**6, layer=replace(LAYER, pads=True)) - base == pytest.approx(8 * 10**6 / COSTS.copying)
    assert price(again=50) - base == pytest.approx(3 * 50 * 1e4 / COSTS.rate)


def test_large_pieces_are_not_copied() -> None:
    large = [FusedLayer(LAYER, 0, 0, 0), FusedLayer(LAYER, 0, 2**23)]
    assert together(large, COSTS, True) == inf
    assert together(large, replace(COSTS, piece=2**24), True) < inf


def test_a_long_chain_is_divided() -> None:
    """Margins grow with each layer, so their price with the square: equal parts are cheapest."""
    levels = 6
    price = [[1 + (j - i) ** 2 if i <= j else inf for j in range(levels)] for i in range(levels)]
    assert first_part(levels, price) in (1, 2)
    assert first_part(levels, [[1.0 + 0.1 * (j - i) for j in range(levels)] for i in range(levels)]) == levels
    assert first_part(2, [[inf, inf], [inf, inf]]) == 1


def test_spans() -> None:
    a = ((Interval(0, 4), Interval(3, 8)),)
    b = ((Interval(1, 6), Interval(4, 8)),)
    assert common(a, b) == ((Interval(1, 4), Interval(4, 8)),)
    assert hull(a, b) == ((Interval(0, 6), Interval(3, 8)),)
    assert covers(hull(a, b), a)
    assert covers(a, common(a, b))
    assert not covers(a, b)
    assert prod(i.size for i in own_spans(layout((7, 5)))[2]) == 12
