"""Windows on a GPU: the bits of the source, from pinned memory that is used again, with few windows on the device."""

from __future__ import annotations

import pytest
import torch

from mural.data.sets.memory_sources import ArraySource
from mural.geometry import Box, Interval, slices
from mural.memory.decoded_cache import DecodedCache
from mural.memory.pinned import Buffers
from mural.memory.window_reads import WindowReads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)


def image(side: int) -> torch.Tensor:
    return torch.randint(0, 255, (3, side, side), generator=torch.Generator().manual_seed(3)).byte()


def windows(side: int, tile: int, halo: int) -> list[tuple[int, Box]]:
    spans = [Interval(max(0, a - halo), min(side, a + tile + halo)) for a in range(0, side, tile)]
    return [(0, (row, column)) for row in spans for column in spans]


def busy(x: torch.Tensor) -> torch.Tensor:
    """Work on the GPU that lasts longer than the reading."""
    y = torch.rand(4096, 4096, device=GPU)
    for _ in range(5):
        y = (y @ y).clamp(0, 1)
    return x.clone()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_windows_are_those_of_the_source(ahead: int, held: bool) -> None:
    """A later window must not overwrite an earlier one that the GPU still uses."""
    values, places = image(1500), windows(1500, 400, 30)
    cache, buffers = DecodedCache(3 * 10**6), Buffers(GPU, keep=ahead + 2)
    for _ in range(2):
        source = values if held else ArraySource(values)
        with WindowReads([source], places, device="cuda", ahead=ahead, cache=cache, buffers=buffers) as reads:
            kept = [busy(window) for window in reads]
        assert not buffers.used
        assert len(buffers.idle) + len(buffers.leaving) <= ahead + 2
        for (_, place), found in zip(places, kept, strict=True):
            assert found.is_cuda
            assert torch.equal(found[0].cpu(), values[(slice(None), *slices(place))])


def test_tensors_on_the_gpu_are_views() -> None:
    values = image(300).cuda()
    with WindowReads([values], windows(300, 200, 10), device="cuda") as reads:
        assert reads[0].data_ptr() == values.data_ptr()


def test_few_windows_are_on_the_device_however_many_there_are() -> None:
    values, peaks = ArraySource(image(4096)), []
    for count in (8, 64):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with WindowReads([values], windows(4096, 512, 32)[:count], device="cuda") as reads:
            for window in reads:
                busy(window)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0] + 3 * 576**2


def test_leaving_early_frees_the_buffers() -> None:
    reads = WindowReads([ArraySource(image(1500))], windows(1500, 400, 30), device="cuda")
    with reads:
        reads[0]
    assert not reads.buffers.used
    assert not reads.buffers.idle
    assert not reads.buffers.leaving
