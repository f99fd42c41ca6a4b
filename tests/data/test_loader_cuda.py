"""The loader on a GPU: pinned memory that is used again, copies beside the computation, the bits of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mural
from mural.data.image_sample import Sample
from mural.data.loading.augment import Augment
from mural.data.loading.loader import Loader
from mural.data.sets.memory_sources import ComputedSource
from mural.errors import DataError
from mural.geometry import Box
from ranks import run_on

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def samples(count: int, size: int = 300) -> list[Sample]:
    draw = torch.Generator().manual_seed(0)
    return [
        Sample(f"{i}", torch.randint(0, 255, (3, size, size), generator=draw).byte(), torch.randint(0, 3, (size, size)))
        for i in range(count)
    ]


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_batches_on_a_gpu_are_those_on_the_cpu(prefetch: int) -> None:
    """Work on the GPU that lasts longer than the reading must not let a later step overwrite an earlier one."""
    options: dict[str, Any] = {"batch": 2, "augment": Augment(noise=0.1, gamma=0.2), "prefetch": prefetch}
    data, mesh = samples(21), mural.init()
    expected = [(b.image.local, b.target.local) for b in Loader(data, mesh, **options).epoch(0)]
    busy = torch.rand(4096, 4096, device="cuda")
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    loader = Loader(data, mesh, device="cuda", **options)
    for batch in loader.epoch(0):
        for _ in range(5):
            busy = (busy @ busy).clamp(0, 1)
        kept.append((batch.image.local.clone(), batch.target.local.clone()))
    assert len(kept) == 11
    for (image, target), (a, b) in zip(kept, expected, strict=True):
        assert image.is_cuda
        assert torch.equal(image.cpu(), a)
        assert torch.equal(target.cpu(), b)
    assert len(loader.buffers.idle) + len(loader.buffers.leaving) < 2 * (prefetch + 4)
    assert not loader.buffers.used


def test_a_loop_that_is_left_gives_its_buffers_back() -> None:
    loader = Loader(samples(9), mural.init(), device="cuda", prefetch=3)
    for _ in loader.epoch(0):
        break
    assert not loader.buffers.used


def sharded(spatial: tuple[int, ...], data: int) -> list[torch.Tensor]:
    loader = Loader(samples(5), mural.init(spatial=spatial, data=data), batch=2, device="cuda", augment=Augment())
    return [batch.image.full().cpu() for batch in loader.epoch(0)]


def test_ranks_that_share_a_gpu() -> None:
    expected = [b.image.local for b in Loader(samples(5), mural.init(), batch=2, augment=Augment()).epoch(0)]
    for found in run_on(4, sharded, (2, 1), 2):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_bad_samples_are_left_out_on_a_gpu() -> None:
    def fails(box: Box) -> torch.Tensor:
        raise DataError("damaged")

    data = samples(4)
    data[1] = Sample("bad", ComputedSource(fails, (3, 300, 300), torch.uint8), data[1].target)
    loader = Loader(data, mural.init(), batch=2, shuffle=False, device="cuda", skip_bad=True)
    found = [batch.image.local.cpu() for batch in loader.epoch(0)]
    assert [tuple(f.shape) for f in found] == [(1, 3, 300, 300), (2, 3, 300, 300)]
    assert torch.equal(found[0][0], data[0].image.float() / 255)
