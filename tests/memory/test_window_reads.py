"""Windows read ahead are slices of the image, whatever the threads, budgets and passes; each block is decoded once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counted_image import CountedImage, box, grid_windows, image, threads_of_readers
from mural.geometry import Box, Interval, slices
from mural.memory import window_source
from mural.memory.decoded_cache import DecodedCache, block_extents
from mural.memory.window_reads import WindowReads

DTYPES = (torch.uint8, torch.int16, torch.float32, torch.float64, torch.bool)


@st.composite
def drawn_windows(draw: st.DrawFn, shapes: Sequence[Sequence[int]]) -> list[tuple[int, Box]]:
    found: list[tuple[int, Box]] = []
    for _ in range(draw(st.integers(0, 7))):
        number = draw(st.integers(0, len(shapes) - 1))
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shapes[number][1:]]
        found.append((number, tuple(Interval(a, b) for a, b in ends)))
    return found


@given(st.data())
def test_windows_are_slices(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    sizes = st.tuples(st.integers(1, 4), *[st.integers(1, 40)] * dims)
    dtype = data.draw(st.sampled_from(DTYPES))
    values = [image(data.draw(sizes), dtype) for _ in range(data.draw(st.integers(1, 2)))]
    chunks = data.draw(st.none() | st.tuples(*[st.integers(1, 16)] * dims))
    sources: list[Any] = [CountedImage(v, chunks, data.draw(st.booleans())) for v in values]
    if data.draw(st.booleans()):
        sources[0] = values[0]
    cache = data.draw(st.sampled_from((None, DecodedCache(0), DecodedCache(700), DecodedCache(10**7))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mural.memory.decoded_cache.POSITIONS", data.draw(st.sampled_from((1, 64, 2**18))))
        patch.setattr(window_source, "MOST_AT_ONCE", data.draw(st.sampled_from((5, 200, 2**20))))
        for _ in range(2):
            windows = data.draw(drawn_windows([v.shape for v in values]))
            options: dict[str, Any] = {"threads": data.draw(st.integers(1, 3)), "ahead": data.draw(st.integers(0, 3))}
            with WindowReads(sources, windows, cache=cache, **options) as reads:
                for (number, place), found in zip(windows, reads, strict=True):
                    assert torch.equal(found, values[number][(slice(None), *slices(place))][None])
                    assert found.dtype == dtype
    assert cache is None or cache.bytes <= cache.budget
    assert not threads_of_readers()


def test_with_room_each_block_is_decoded_once() -> None:
    source = CountedImage(image((3, 900, 1300)), (256, 256))
    cache = DecodedCache(10**8)
    for side, halo in ((400, 40), (300, 7), (900, 0)):
        windows = grid_windows(source.shape[1:], side, halo)
        with WindowReads([source], windows, cache=cache) as reads:
            for (_, place), found in zip(windows, reads, strict=True):
                assert torch.equal(found[0], source.values[(slice(None), *slices(place))])
    assert set(Counter(source.boxes).values()) == {1}
    assert len(source.boxes) == 2 * 3 == len(cache)
    assert cache.bytes == source.values.nbytes


@pytest.mark.parametrize(("tile", "kept"), [(256, True), (8, False)])
def test_a_single_pass_keeps_what_it_tears_apart(tile: int, kept: bool) -> None:
    """Tiles of the file that several windows touch are decoded once; others are not copied to be kept."""
    source, cache = CountedImage(image((3, 900, 1300)), (tile, tile)), DecodedCache(10**8)
    windows = grid_windows(source.shape[1:], 300, 5)
    with WindowReads([source], windows, cache=cache, once=True) as reads:
        for (_, place), found in zip(windows, reads, strict=True):
            assert torch.equal(found[0], source.values[(slice(None), *slices(place))])
    assert bool(len(cache)) == kept
    assert set(Counter(source.boxes).values()) == {1}


def test_decoded_blocks_are_copied_by_few_tasks() -> None:
    """A task for each block took longer than the copies, while the GPU waited for its window."""
    values = image((1, 512, 4096))
    source = window_source.WindowSource(CountedImage(values, (256, 256)), 0)
    cache, window, out = DecodedCache(10**8), (Interval(0, 512), Interval(0, 4096)), torch.empty(1, 512, 4096).byte()
    counts = []
    for _ in range(2):
        fills = list(source.fills(window, out.zero_(), 4, cache))
        for fill, _ in fills:
            fill()
        assert torch.equal(out, values)
        counts.append(len(fills))
    assert counts == [8, 4]


def test_a_small_budget_saves_what_fits_in_every_pass() -> None:
    source = CountedImage(image((1, 2048, 1024)), (512, 512))
    cache, windows, counts = DecodedCache(3 * 512**2), grid_windows((2048, 1024), 512, 0), []
    for order in (windows, windows, windows[::-1]):
        before = len(source.boxes)
        with WindowReads([source], order, cache=cache) as reads:
            for (_, place), found in zip(order, reads, strict=True):
                assert torch.equal(found[0], source.values[(slice(None), *slices(place))])
        counts.append(len(source.boxes) - before)
    assert counts == [8, 5, 5]


def test_blocks_are_whole_tiles() -> None:
    assert block_extents((10**5, 10**5), (1, 1)) == (512, 512)
    assert block_extents((10**5, 10**5), (240, 240)) == (480, 480)
    assert block_extents((10**5, 10**5), (1024, 1024)) == (1024, 1024)
    assert block_extents((300, 300, 300), (1, 1, 1)) == (64, 64, 64)
    assert block_extents((10**7,), (1,)) == (2**18,)
    assert block_extents((5, 10**5), (1, 1)) == (8, 32768)


def test_what_does_not_fit_is_not_read_beyond_the_window() -> None:
    source = CountedImage(image((1, 600, 600)))
    with WindowReads([source], [(0, box((10, 20), (500, 530)))], cache=DecodedCache(5)) as reads:
        reads[0]
    assert sorted(source.boxes) == [((0, 1), (10, 20), (500, 512)), ((0, 1), (10, 20), (512, 530))]


def test_large_windows_are_divided_for_several_threads() -> None:
    source = CountedImage(image((1, 512, 256)), (64, 64))
    source.meeting = threading.Barrier(4)
    with WindowReads([source], [(0, box((0, 512), (0, 256)))], threads=4) as reads:
        assert torch.equal(reads[0][0], source.values)
    assert sorted(source.boxes) == [((0, 1), (a, a + 128), (0, 256)) for a in range(0, 512, 128)]


def test_windows_are_read_ahead_and_no_further() -> None:
    source = CountedImage(image((1, 40, 8)))
    windows = [(0, box((a, a + 4), (0, 8))) for a in range(0, 40, 4)]
    with WindowReads([source], windows, threads=1, ahead=2) as reads:
        for i in range(2):
            reads[i]
            while len(source.boxes) < i + 3:
                time.sleep(0.01)
            time.sleep(0.1)
            assert len(source.boxes) == i + 3


def test_windows_may_be_skipped_and_read_again() -> None:
    values = image((2, 64, 64))
    for cache in (None, DecodedCache(2000), DecodedCache(10**6)):
        source = CountedImage(values, (16, 16), seconds=0.002)
        windows = grid_windows((64, 64), 16, 3)
        with WindowReads([source], windows, cache=cache) as reads:
            for i in (0, 1, 5, 6, 2, 15, 15, 0, 14):
                assert torch.equal(reads[i][0], values[(slice(None), *slices(windows[i][1]))])
        assert cache is None or cache.bytes <= cache.budget


def test_tensors_are_returned_as_views_on_their_own_device() -> None:
    values = image((2, 30, 40), torch.float32).requires_grad_()
    with WindowReads([values], [(0, box((3, 20), (5, 40)))], cache=DecodedCache(10**6)) as reads:
        found = reads[0]
    assert found.data_ptr() == values[:, 3:, 5:].data_ptr()
    assert not found.requires_grad
    assert torch.equal(found[0], values.detach()[:, 3:20, 5:40])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_reading_for_inference(mode: Any) -> None:
    values = image((1, 30, 40))
    with mode(), WindowReads([CountedImage(values)], grid_windows((30, 40), 16, 2), cache=DecodedCache(10**6)) as reads:
        assert torch.equal(reads[4][0], values[:, 14:30, 14:34])
