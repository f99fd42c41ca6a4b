"""Windows read ahead: equal to slices of the image, whatever the threads, budgets and passes; nothing is left after."""

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
from torch import Tensor

from mural.errors import DataError, LayoutError
from mural.geometry import Box, Interval, slices, whole
from mural.memory import window_source
from mural.memory.decoded_cache import DecodedCache, block_extents
from mural.memory.pinned import Buffers, Sent
from mural.memory.window_reads import WindowReads

DTYPES = (torch.uint8, torch.int16, torch.float32, torch.float64, torch.bool)


class CountedImage:
    """A source that counts its reads, and may say its type and tiles, wait, or raise at a position."""

    def __init__(
        self, values: Tensor, chunks: Sequence[int] | None = None, says_dtype: bool = True, seconds: float = 0
    ):
        self.name, self.values, self.shape, self.seconds = "counted.tif", values, tuple(values.shape), seconds
        if says_dtype:
            self.dtype = values.dtype
        if chunks is not None:
            self.chunks = (values.shape[0], *chunks)
        self.boxes: list[tuple[tuple[int, int], ...]] = []
        self.bad: tuple[int, ...] | None = None
        self.meeting: threading.Barrier | None = None
        self.lock = threading.Lock()

    def read(self, box: Any) -> Tensor:
        with self.lock:
            self.boxes.append(tuple((a, b) for a, b in box))
        time.sleep(self.seconds)
        if self.meeting is not None:
            self.meeting.wait(60)
        if self.bad is not None and all(a <= at < b for at, (a, b) in zip(self.bad, box[1:], strict=True)):
            raise OSError("a damaged tile")
        return self.values[tuple(slice(a, b) for a, b in box)]


def image(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(0, 200, tuple(shape), generator=torch.Generator().manual_seed(7)).to(dtype)


def box(*pairs: tuple[int, int]) -> Box:
    return tuple(Interval(*pair) for pair in pairs)


def grid_windows(extents: Sequence[int], side: int, halo: int) -> list[tuple[int, Box]]:
    """Tiles with a halo, over the whole of image 0, in rows."""
    rows, columns = ([(max(0, a - halo), min(n, a + side + halo)) for a in range(0, n, side)] for n in extents)
    return [(0, box(row, column)) for row in rows for column in columns]


def threads_of_readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mural-reader")]


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


def test_windows_are_converted_as_they_arrive() -> None:
    values = image((1, 30, 40))
    with WindowReads([CountedImage(values)], [(0, whole((30, 40)))], convert=lambda x: x[:, 0].long()) as reads:
        assert torch.equal(reads[0], values.long())


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_reading_for_inference(mode: Any) -> None:
    values = image((1, 30, 40))
    with mode(), WindowReads([CountedImage(values)], grid_windows((30, 40), 16, 2), cache=DecodedCache(10**6)) as reads:
        assert torch.equal(reads[4][0], values[:, 14:30, 14:34])


@pytest.mark.parametrize("budget", [0, 10**7])
def test_an_error_is_raised_at_the_window_that_needed_it(budget: int) -> None:
    source = CountedImage(image((1, 64, 64)))
    source.bad = (20, 40)
    windows = grid_windows((64, 64), 16, 0)
    with WindowReads([source], windows, cache=DecodedCache(budget)) as reads:
        for i, (_, place) in enumerate(windows):
            if i != 6:  # rows 16 to 32, columns 32 to 48
                assert torch.equal(reads[i][0], source.values[(slice(None), *slices(place))])
                continue
            with pytest.raises(DataError, match="a damaged tile") as caught:
                reads[i]
            assert "counted.tif: the window ((16, 32), (32, 48)) cannot be read: OSError" in str(caught.value)
            assert caught.value.name == "counted.tif"
            assert isinstance(caught.value.__cause__, OSError)
        source.bad = None
        assert torch.equal(reads[6][0], source.values[:, 16:32, 32:48])
    assert not threads_of_readers()


def test_a_source_whose_type_cannot_be_read() -> None:
    source = CountedImage(image((1, 8, 8)), says_dtype=False)
    source.bad = (0, 0)
    with WindowReads([image((1, 8, 8)), source], [(0, whole((8, 8))), (1, whole((8, 8)))]) as reads:
        reads[0]
        with pytest.raises(DataError, match=r"counted\.tif: the window"):
            reads[1]


def test_a_source_that_gives_something_else_is_refused() -> None:
    source = CountedImage(image((1, 8, 8)))
    source.dtype = torch.float32
    with WindowReads([source], [(0, whole((8, 8)))]) as reads, pytest.raises(DataError, match="has to give"):
        reads[0]


@pytest.mark.parametrize("budget", [0, 1000, 10**7])
def test_closing_while_reads_are_under_way(budget: int) -> None:
    source, cache = CountedImage(image((1, 256, 256)), (16, 16), seconds=0.02), DecodedCache(budget)
    windows = grid_windows((256, 256), 64, 8)

    def leave() -> None:
        with WindowReads([source], windows, cache=cache, threads=2) as reads:
            reads[0]
            raise RuntimeError("mine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mural.memory.decoded_cache.POSITIONS", 256)
        with pytest.raises(RuntimeError, match="mine"):
            leave()
        assert not threads_of_readers()
        count = len(source.boxes)
        time.sleep(0.05)
        assert len(source.boxes) == count
        # What was given up is no hole in the cache: the next pass has it again.
        source.seconds = 0
        with WindowReads([source], windows, cache=cache) as reads:
            for (_, place), found in zip(windows, reads, strict=True):
                assert torch.equal(found[0], source.values[(slice(None), *slices(place))])
    with pytest.raises(DataError, match="closed"):
        reads[0]


def test_two_readers_that_share_a_cache_and_a_source() -> None:
    source, cache = CountedImage(image((1, 256, 256)), (64, 64), seconds=0.001), DecodedCache(10**7)
    windows = grid_windows((256, 256), 64, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mural.memory.decoded_cache.POSITIONS", 64**2)
        with WindowReads([source], windows, cache=cache) as some, WindowReads([source], windows, cache=cache) as others:
            for (_, place), a, b in zip(windows, some, others, strict=True):
                assert torch.equal(a, b)
                assert torch.equal(a[0], source.values[(slice(None), *slices(place))])
    assert len(source.boxes) == 16


class FakeLanes:
    """A GPU that is done with queued work only when it is waited for."""

    def __init__(self) -> None:
        self.queued, self.done = 0, 0

    def now(self) -> int:
        self.queued += 1
        return self.queued

    def finish(self, moment: int) -> None:
        self.done = max(self.done, moment)


class FakePinned(Buffers):
    """Buffers of a GPU in ordinary memory: what is in use, and what was sent."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.lanes = FakeLanes()  # type: ignore[assignment]
        self.taken: set[int] = set()
        self.rooms: set[int] = set()

    def new(self, shape: Sequence[int], dtype: torch.dtype, room: int = 0) -> Tensor:
        found = torch.empty(tuple(shape), dtype=dtype)
        self.taken.add(found.data_ptr())
        self.rooms.add(room)
        return found

    def drop(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.taken.remove(tensor.data_ptr())

    def sent(self, tensor: Tensor) -> Sent:
        self.taken.remove(tensor.data_ptr())
        return Sent(tensor.clone(), None, None)


def test_buffers_come_back_and_the_gpu_is_not_left_far_behind() -> None:
    source, buffers = CountedImage(image((1, 256, 256)), seconds=0.001), FakePinned()
    windows, lanes = grid_windows((256, 256), 64, 8), buffers.lanes
    with WindowReads([source], windows, buffers=buffers, ahead=2) as reads:
        for i, (_, place) in enumerate(windows):
            assert torch.equal(reads[i][0], source.values[(slice(None), *slices(place))])
            assert lanes.queued == i + 1  # type: ignore[union-attr]
            assert lanes.done == i  # type: ignore[union-attr]  # everything before window i - 1
            assert len(buffers.taken) <= 2
        reads[0]
        source.bad = (30, 100)
        with pytest.raises(DataError, match="a damaged tile"):
            reads[1]
    assert not buffers.taken
    assert buffers.rooms == {80 * 80}


def test_what_is_refused() -> None:
    values = image((1, 8, 8))
    for windows, match in (
        ([(1, whole((8, 8)))], "image 1, but the images are 0 to 0"),
        ([(0, box((0, 9), (0, 8)))], "is not within the spatial extents"),
        ([(0, box((0, 8)))], "one \\(start, stop\\) per spatial dim"),
    ):
        with pytest.raises(LayoutError, match=match):
            WindowReads([values], windows)
    with pytest.raises(LayoutError, match="image 0 is a ndarray"):
        WindowReads([values.numpy()], [])  # type: ignore[list-item]
    with pytest.raises(LayoutError, match="threads=0"):
        WindowReads([values], [], threads=0)
    with WindowReads([values], []) as reads:
        assert list(reads) == []
        with pytest.raises(IndexError):
            reads[0]
