"""Windows that cannot be read, reading that is closed early, and buffers that come back."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from counted_image import CountedImage, box, grid_windows, image, threads_of_readers
from mural.errors import DataError, LayoutError
from mural.geometry import slices, whole
from mural.memory.decoded_cache import DecodedCache
from mural.memory.pinned import Buffers, Sent
from mural.memory.window_reads import WindowReads


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
