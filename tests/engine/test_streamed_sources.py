"""Images of integers that a source scales: they travel as they are stored, and are converted where the model is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mural
from mural.data import ComputedSource, Source, scaled
from mural.engine.tile_inputs import formed
from mural.geometry import slices
from mural.memory.pinned import Buffers
from mural.memory.window_reads import WindowReads
from streamed_law import apart, differences, streamed, wrong
from streamed_models import Spec

CONVERSIONS: dict[str, dict[str, Any]] = {
    "range": {}, "number": {"scale": 200.0}, "channels": {"mean": (0.1, 0.2), "std": (0.3, 0.7)},
    "one for all": {"scale": (3.0, 90.0), "mean": 0.5},
}  # fmt: skip


def stored(dtype: torch.dtype, seed: int) -> tuple[Source, Tensor]:
    """A source of integers, and all of it."""
    most = torch.iinfo(dtype).max
    values = torch.randint(0, most, (2, 21, 26), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return ComputedSource(lambda box: values[slices(box)], (2, 21, 26), dtype, f"image {seed}"), values


@pytest.mark.parametrize("dtypes", [(torch.uint16, torch.uint16), (torch.uint8, torch.int16)])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_scaled_sources(conversion: str, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    travelled: set[torch.dtype] = set()
    new = Buffers.new

    def watched(self: Buffers, shape: Any, dtype: torch.dtype, *rest: Any, **more: Any) -> Tensor:
        travelled.add(dtype)
        return new(self, shape, dtype, *rest, **more)

    monkeypatch.setattr(Buffers, "new", watched)
    sources: list[Any] = [
        scaled(stored(dtype, seed)[0], **CONVERSIONS[conversion]) for seed, dtype in enumerate(dtypes)
    ]
    whole = torch.stack([source.converted(torch.float64).read() for source in sources])
    target = torch.randint(0, 3, (2, 21, 26), generator=torch.Generator().manual_seed(7))
    plain = Spec(norm="batch").build()
    expected = F.cross_entropy(plain(whole), target)
    expected.backward()
    pm = mural.parallelize(Spec(norm="batch").build(), mural.Plan(stream=(9, 10)))
    assert apart(pm.step(sources, target), expected) < 1e-10
    assert not wrong(differences(pm, plain, F.cross_entropy, []))
    assert travelled == set(dtypes)


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_read_is_kept_on_the_host(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps after the first one read no source, where values are on the host as well."""
    sweeps: list[int] = []
    begin = WindowReads.__init__

    def watched(self: WindowReads, sources: Any, windows: Any, **more: Any) -> None:
        sweeps.append(len(windows))
        begin(self, sources, windows, **more)

    monkeypatch.setattr(WindowReads, "__init__", watched)
    whole = torch.stack([stored(torch.uint8, seed)[1] for seed in range(count)]).double() / 255
    classes = torch.randint(0, 3, (count, 1, 21, 26), generator=torch.Generator().manual_seed(7)).byte()
    masks = [ComputedSource(lambda box, mask=mask: mask[slices(box)], (1, 21, 26), torch.uint8) for mask in classes]
    plain = Spec(norm="batch", depth=2).build()
    pm = streamed(Spec(norm="batch", depth=2).build(), F.cross_entropy, mural.Plan(stream=(9, 10)), "host")
    for number in range(2):
        F.cross_entropy(plain(whole), classes[:, 0].long()).backward()
        pm.step([scaled(stored(torch.uint8, seed)[0], dtype=torch.float64) for seed in range(count)], masks)
        assert not wrong(differences(pm, plain, F.cross_entropy, []))
        assert len(sweeps) == 2 * (number + 1), "image and mask are read once in a step"


@pytest.mark.parametrize("channels", [1, 3])
def test_windows_have_the_strides_of_their_memory_format(channels: int) -> None:
    """A single image may have any stride along the batch, and gradients were copied to another memory format for it."""
    window = torch.rand(5, 7, channels).permute(2, 0, 1)[None]
    found = formed(window, torch.channels_last)
    assert found.equal(window)
    assert found.stride() == torch.empty(1, channels, 5, 7).to(memory_format=torch.channels_last).stride()


def test_sources_that_are_scaled_differently() -> None:
    """Each is then converted as it is read."""
    sources = [scaled(stored(torch.uint8, seed)[0], scale=factor) for seed, factor in enumerate((100.0, 255.0))]
    whole = torch.stack([source.read() for source in sources]).double()
    pm, plain = (Spec(norm="frozen").build() for _ in range(2))
    found = mural.parallelize(pm, mural.Plan(stream=(9, 10)))(sources)
    assert apart(found.full(), plain(whole)) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_a_gpu_converts_to_the_same_bits(conversion: str, dtype: torch.dtype) -> None:
    """By a number of Python's it would divide by multiplying."""
    source, values = stored(dtype, 1)
    converted: Any = scaled(source, **CONVERSIONS[conversion])
    assert converted.values_of(values.cuda()).cpu().equal(converted.read())
